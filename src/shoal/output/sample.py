"""One sample while it is generated: tokens in, text out, cut at the first stop string.

Owns its tokens, logprobs and detokenizer, and why it ended. Knows a Job and a tokenizer; no engine, no API.
"""

from shoal.core.job import Ending, Job
from shoal.core.request import Logprobs, Reason
from shoal.output.logprob_list import LogprobList
from shoal.output.parser import Parsed, Parser, PlainParser
from shoal.text.detok import Detokenizer
from shoal.text.tokenizer import Tokenizer


class Sample:
    """Takes one token after the other. Tokens after a stop string must not be passed in; see `stopped`."""

    __slots__ = (
        "_detok", "_job", "_tokenizer", "ending", "include_stop", "index", "logprobs", "min_tokens", "number", "parser",
        "reason", "stop_ids", "stop_reason", "stopped", "tokens",
    )  # fmt: skip

    def __init__(
        self, job: Job, number: int, index: int, tokenizer: Tokenizer | None, parser: Parser | None = None
    ) -> None:
        self.number = number  # among the samples of its job
        self.index = index  # among all samples that are collected together
        self._job, self._tokenizer = job, tokenizer
        self._detok: Detokenizer | None = None  # opened by the first token: a call may have a thousand samples
        self.parser: Parser = parser or PlainParser()
        self.stop_ids = job.stop_ids
        self.min_tokens = 0 if job.grammar is not None else job.params.min_tokens  # a grammar may end before
        self.include_stop = job.params.include_stop_str_in_output
        self.tokens: list[int] = []
        self.logprobs = LogprobList()  # one per token that was taken with them
        self.stopped = False  # a stop string was found; the caller drops tokens that arrive later
        self.ending: Ending | None = None  # as the engine reported it
        self.reason: str | None = None  # why it ended, stop strings considered
        self.stop_reason: str | int | None = None  # the stop string or stop token that ended it

    @property
    def text(self) -> str:
        """All text so far, without what is held back."""
        return "" if self._detok is None else self._detok.text

    @property
    def parsed(self) -> Parsed:
        """The parts of the whole text."""
        return self.parser.parse(self.text)

    def take(self, token: int, logprobs: Logprobs | None) -> str:
        """Add the next token; returns the text that can be shown now. Logprobs are kept until the sample is dropped."""
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        detok = self._detok
        if detok is None:
            if self._tokenizer is None:
                return ""
            detok = self._detok = open_detokenizer(self._tokenizer, self._job)
        if token in self.stop_ids and len(self.tokens) > self.min_tokens and not self.include_stop:
            return ""  # the sample ends here, and the text of its stop token is not shown
        text = detok.push(token)
        if detok.stop_at is not None:
            self._stop(detok.stop_at)
        return text

    def end(self, ending: Ending, eos: bool) -> str:
        """No token follows; returns the text that was held back. `eos`: the stop token is one of the model's own."""
        rest = ""
        if self._detok is not None and not self.stopped:
            rest = self._detok.finish()
            if self._detok.stop_at is not None:  # found only now, in text that was held back
                self._stop(self._detok.stop_at)
        self.ending = ending
        self.reason, self.stop_reason = ending.reason, None if eos else ending.stop_token
        if self.stopped and self._detok and ending.reason in (Reason.STOP.value, Reason.LENGTH.value):
            self.reason, self.stop_reason = Reason.STOP.value, self._detok.stopped
        return rest

    def _stop(self, tokens: int) -> None:
        """A stop string was found: keep only the first `tokens` tokens, the last of which completes it."""
        self.stopped = True
        del self.tokens[tokens:]
        self.logprobs.cut(tokens)


def open_detokenizer(tokenizer: Tokenizer, job: Job) -> Detokenizer:
    params = job.params
    return Detokenizer(
        tokenizer,
        job.prompt,
        tuple(params.stop),
        params.include_stop_str_in_output,
        params.skip_special_tokens,
        params.min_tokens,
        tuple(params.stop_regex),
    )
