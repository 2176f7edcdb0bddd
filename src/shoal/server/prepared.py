"""One HTTP request, ready to be submitted. Owns what is known of it then: its jobs, and how to answer it."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.core.job import Job
from shoal.output.outputs import Outputs
from shoal.output.parser import Parser, PlainParser
from shoal.server.errors import HttpError
from shoal.server.response_log import EventLog
from shoal.server.tool_choice import NO_TOOLS, ToolRequest


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """One HTTP request, ready to be submitted, and how to answer it."""

    jobs: list[Job]
    keep: int  # answers shown for each prompt; fewer than are sampled with best_of
    model: str
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False  # in every event
    top: int | None = None  # alternatives to show for each token; None: no logprobs at all
    echo: list[str] | None = None  # the text of each prompt, where it is repeated before the answer
    prefix: str = ""  # text that is repeated before each answer
    prompt_top: int | None = None  # alternatives to show for each token of the prompt; None: no logprobs of it
    prompt_only: bool = False  # nothing is generated; the one token that was is not shown
    token_ids: bool = False  # show token ids
    tokens_as_ids: bool = False  # in logprobs, write tokens as their ids
    length_penalty: float | None = None  # of a beam search; None: answers are drawn
    request_id: str = ""  # the client's own name for it
    warnings: list[str]  # fields that have no effect
    make_parser: Callable[[], Parser] = PlainParser
    tools: ToolRequest = NO_TOOLS

    @property
    def shows_tokens(self) -> bool:
        """Whether each token is shown, and not only the text."""
        return self.token_ids or self.top is not None

    @property
    def skip_special(self) -> bool:
        return self.jobs[0].params.skip_special_tokens

    @property
    def in_background(self) -> bool:
        """The client is answered at once, and the request goes on without it."""
        return False

    async def at_begin(self, cancel: Callable[[], None]) -> bytes:
        """The answer to a request that goes on in the background. `cancel`: ends it."""
        raise NotImplementedError

    async def at_stream_begin(self, cancel: Callable[[], None]) -> EventLog:
        """The same for one that is streamed: where its events go."""
        raise NotImplementedError

    async def at_end(self, outputs: Outputs) -> None:
        """All samples have ended well; the end of the answer is sent after this."""

    async def at_failure(self, error: HttpError) -> None:
        """A request in the background has failed."""
