"""Every error Shoal raises on purpose. Each message says what to change.

ShoalError
├── BadRequest            one request cannot be served as written
│   ├── EmptyPrompt         nothing to continue
│   ├── PromptTooLong       more tokens than the model's context or the KV cache can ever hold
│   ├── BadParameter        a sampling parameter is out of range or of the wrong type
│   ├── BadGrammar          a schema, regex or grammar that cannot be used
│   └── BadChat             the messages do not fit the model's chat template
├── Rejected              a valid request that is not served now
│   ├── QueueFull           too many requests are queued
│   ├── RateLimited         this key has exceeded its rate or its share of concurrent requests
│   ├── DeadlinePassed      its timeout passed before its first token
│   ├── PromiseBroken       its tier's promise (SLO) can no longer be kept
│   ├── Evicted             KV memory ran out, and it was not resumed
│   ├── GrammarTimeout      its grammar was not compiled in time
│   ├── Draining            the server is shutting down
│   ├── EngineDown          the engine is starting or has stopped
│   └── LedgerDown          the limits of its API key cannot be checked now
├── BadConfig             the engine cannot be built as configured
│   ├── UnknownName         no such policy, option or file key; the known ones are listed
│   └── ImpossiblePair      two choices that cannot work together
├── ModelError            the model cannot be used
│   ├── ModelNotFound       no such folder, file or hub name
│   ├── UnsupportedModel    an architecture, rope scaling or tensor type that is not supported
│   ├── BadWeights          a file is missing, truncated or does not fit the config
│   ├── UnsafeWeights       a pickle file; only safetensors and GGUF are read
│   └── TokenizerMismatch   the tokenizer does not belong to this vocabulary
└── EngineError           the engine failed while computing
    ├── RequestFailed       … for one request alone
    ├── TransferFailed      KV blocks of another engine did not come; they are computed here
    └── EngineLost          … and cannot go on: a rank of it has ended or hangs

Also how a message shows a value, and an error on a terminal. Knows nothing of the rest of the package.
"""

import reprlib


class ShoalError(Exception):
    """Base of all errors Shoal raises on purpose."""


class BadRequest(ShoalError, ValueError):
    """One request cannot be served as written."""


class EmptyPrompt(BadRequest):
    """The prompt has no tokens."""


class PromptTooLong(BadRequest):
    """Prompt plus max_tokens exceed what the model or the KV cache can ever hold."""


class BadParameter(BadRequest):
    """A sampling parameter is out of range or of the wrong type."""


class BadGrammar(BadRequest):
    """A schema, regex or grammar that cannot be used: malformed, too large or too complex."""


class BadChat(BadRequest):
    """The messages do not fit the model's chat template."""


class Rejected(ShoalError):
    """A valid request that is not served now. `retry_after_s` is when a retry may succeed, if that is known."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Rejected):
    """Too many requests are queued."""


class RateLimited(Rejected):
    """This key has exceeded its rate or its share of concurrent requests."""


class Draining(Rejected):
    """The server is shutting down."""


class EngineDown(Rejected):
    """The engine is starting or has stopped."""


class LedgerDown(Rejected):
    """The limits of the request's API key cannot be checked at the moment."""


class DeadlinePassed(Rejected):
    """The request's timeout passed before its first token."""


class PromiseBroken(Rejected):
    """The promise (SLO) of the request's tier cannot be kept, even if it started now."""


class Evicted(Rejected):
    """KV memory ran out, and the request was evicted without being resumed."""


class GrammarTimeout(Rejected):
    """The compilation of the request's grammar took too long, or the machine is too busy for it."""


class BadConfig(ShoalError, ValueError):
    """The engine cannot be built as configured."""


class UnknownName(BadConfig):
    """No such policy, option or file key."""


class ImpossiblePair(BadConfig):
    """Two choices that cannot work together."""


class ModelError(ShoalError):
    """The model cannot be used."""


class ModelNotFound(ModelError):
    """No such folder, file or hub name."""


class UnsupportedModel(ModelError):
    """An architecture, rope scaling or tensor type that is not supported."""


class BadWeights(ModelError):
    """A weights file is missing, truncated or does not fit the config."""


class UnsafeWeights(ModelError):
    """Only safetensors and GGUF are read, never a pickle file."""


class TokenizerMismatch(ModelError):
    """The tokenizer does not belong to this vocabulary."""


class EngineError(ShoalError):
    """The engine failed while computing."""


class RequestFailed(EngineError):
    """One request failed; the others in its batch did not."""


class TransferFailed(EngineError):
    """KV blocks of another engine did not come, or are not those that were asked for."""


class EngineLost(EngineError):
    """The engine cannot go on: a rank has ended or hangs, or a pass failed on one of several ranks.

    fault: whether the requests of the last passes may be the cause; a rank that was killed from outside has none.
    """

    def __init__(self, message: str, fault: bool = True) -> None:
        super().__init__(message)
        self.fault = fault


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
LONGEST_LINE = 2000


def shown(value: object) -> str:
    """A value from outside for use in a message: its repr, cut where it is long or deep.

    >>> shown("two"), shown([[[[[[[[1]]]]]]]]), len(shown("x" * 1000))
    ("'two'", '[[[[[[[...]]]]]]]', 200)
    """
    text = _SHORT.repr(value)
    return text if len(text) <= _SHORT.maxstring else f"{text[: _SHORT.maxstring]}…"


def one_line(error: BaseException) -> str:
    """A message for a terminal: on one line, without control characters, and not endless.

    >>> one_line(BadConfig("no folder 'a\\nb';\\n  choose\\x1b[2J another"))
    "no folder 'a b'; choose?[2J another"
    """
    text = " ".join(str(error)[: 2 * LONGEST_LINE].split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE]}…"
