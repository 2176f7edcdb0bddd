"""Every error Shoal raises on purpose. Each message says what to change.

ShoalError
├── BadRequest            one request cannot be served as it was asked
│   ├── EmptyPrompt         nothing to continue
│   ├── PromptTooLong       more tokens than the model's context or the KV cache can ever hold
│   ├── BadParameter        a sampling parameter has a value that means nothing
│   ├── BadGrammar          a schema, regex or grammar that cannot be used
│   └── BadChat             the messages do not fit the model's chat template
├── Rejected              a good request that is not served now
│   ├── QueueFull           too many are waiting
│   ├── RateLimited         this key has asked for too much lately, or for too much at once
│   ├── DeadlinePassed      it waited longer than it was willing to
│   ├── PromiseBroken       what its tier promises cannot be kept any more
│   ├── Evicted             it lost its place to others when memory was short
│   ├── Draining            the server is about to stop
│   └── EngineDown          the engine is starting, or gone
├── BadConfig             the engine cannot be built as configured
│   ├── UnknownName         no such policy, option or file key; the known ones are listed
│   └── ImpossiblePair      two choices that cannot work together
├── ModelError            the model cannot be used
│   ├── ModelNotFound       no such folder, file or hub name
│   ├── UnsupportedModel    an architecture, rope scaling or tensor type Shoal does not know
│   ├── BadWeights          a file is missing, truncated or does not fit the config
│   ├── UnsafeWeights       a pickle file; only safetensors and GGUF are read
│   └── TokenizerMismatch   the tokenizer does not belong to this vocabulary
└── EngineError           the engine failed while computing
    └── RequestFailed       … for one request alone

Knows nothing of the rest of the package.
"""


class ShoalError(Exception):
    """Base of all errors Shoal raises on purpose."""


class BadRequest(ShoalError, ValueError):
    """One request cannot be served as it was asked."""


class EmptyPrompt(BadRequest):
    """The prompt has no tokens."""


class PromptTooLong(BadRequest):
    """Prompt plus max_tokens exceed what the model or the KV cache can ever hold."""


class BadParameter(BadRequest):
    """A sampling parameter has a value that means nothing."""


class BadGrammar(BadRequest):
    """A schema, regex or grammar that cannot be used: malformed, too large or too slow to compile."""


class BadChat(BadRequest):
    """The messages do not fit the model's chat template."""


class Rejected(ShoalError):
    """A good request that is not served now. `retry_after_s` is when it might be, if anybody knows."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Rejected):
    """Too many requests are waiting."""


class RateLimited(Rejected):
    """This key has asked for too much lately, or for too much at once."""


class Draining(Rejected):
    """The server is about to stop."""


class EngineDown(Rejected):
    """The engine is starting, or gone."""


class DeadlinePassed(Rejected):
    """The request waited longer than it was willing to."""


class PromiseBroken(Rejected):
    """What the request's tier promises cannot be kept, even if it started now."""


class Evicted(Rejected):
    """Memory was short, and this request had to give way for good."""


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
    """An architecture, rope scaling or tensor type Shoal does not know."""


class BadWeights(ModelError):
    """A weights file is missing, truncated or does not fit the config."""


class UnsafeWeights(ModelError):
    """Only safetensors and GGUF are read, never a pickle file."""


class TokenizerMismatch(ModelError):
    """The tokenizer does not belong to this vocabulary."""


class EngineError(ShoalError):
    """The engine failed while computing."""


class RequestFailed(EngineError):
    """One request failed; its neighbours did not."""
