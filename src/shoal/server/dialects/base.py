"""The interface of an API dialect: read a body, write the whole answer, or write a stream event by event.

Owns no bytes: what an event looks like is up to the dialect, when it is sent up to stream.py.

    accepted ──► ChoiceWriter.opening()      the role, the prompt; b"" where there is neither
    token ─────► ChoiceWriter.delta()        the hot path: text only
                 ChoiceWriter.full_delta()   … with token ids or logprobs
    ended ─────► ChoiceWriter.end()          the rest of the text, and why it ended
    all ended ─► StreamWriter.last()         usage or an error, and the mark of the end
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from shoal.core.request import Logprobs
from shoal.keys.api_key import ApiKey
from shoal.output.parser import Parsed
from shoal.output.sample import Sample
from shoal.server.errors import ErrorBody, HttpError
from shoal.server.jobs import Call
from shoal.server.prepared import PreparedRequest

SSE = "text/event-stream"


@dataclass(frozen=True)
class Operation:
    """How the API's description presents a dialect."""

    summary: str
    request: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    chunk: type[msgspec.Struct]
    example: Mapping[str, Any]  # a body without its model
    overrides: Mapping[str, Any]  # fields of the request whose schema the types cannot express
    error: type[msgspec.Struct] = ErrorBody
    stream_kind: str = SSE  # the content type of a streamed answer
    ends_with: str = "then `data: [DONE]`"  # how a stream ends
    also_lists: bool = False  # an answer may be a list of those


class ChoiceWriter(Protocol):
    """Writes the events of one sample. Each method returns bytes that are ready to be sent."""

    def opening(self) -> bytes:
        """Before the first token."""

    def delta(self, parsed: Parsed) -> bytes:
        """What a token has added, and nothing else."""

    def full_delta(self, parsed: Parsed, tokens: list[int], logprobs: Sequence[Logprobs]) -> bytes:
        """… with the tokens and logprobs that were asked for."""

    def end(self, parsed: Parsed) -> bytes:
        """The rest of the text, and why the sample ended."""


class StreamWriter(Protocol):
    """Writes the events of one request."""

    opens_on_accept: bool  # samples are opened when their job is accepted; else with their first token

    def choice(self, job: int, sample: Sample) -> ChoiceWriter:
        """For a sample of job number `job`."""

    def last(self, error: HttpError | None) -> bytes:
        """What ends the stream."""


class Dialect(Protocol):
    """One API."""

    path: str
    id_prefix: str  # of an answer's id
    operation: Operation

    async def prepare(self, body: bytes, id: str, key: ApiKey | None) -> PreparedRequest:
        """Read and check a body; `id` names its jobs."""

    def whole(self, call: Call, id: str, created: int) -> Iterator[bytes]:
        """The JSON of the answer to a call that is over, in pieces of a few milliseconds of work. Used in a thread."""

    def stream(self, call: Call, id: str, created: int) -> StreamWriter: ...

    def error(self, error: HttpError) -> bytes:
        """The body of an answer that is an error."""
