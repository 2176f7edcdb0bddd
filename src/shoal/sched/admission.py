"""Admission: accept a request, or say why not.

Only what can never work is refused here; what merely has to wait is queued. Knows limits, not loads.
"""

from dataclasses import dataclass

from shoal.core.request import Request
from shoal.errors import BadParameter, EmptyPrompt, PromptTooLong


@dataclass(frozen=True)
class Limits:
    """What this engine can hold at once."""

    max_model_len: int  # tokens of one sequence, prompt and output together
    max_num_seqs: int  # requests in one pass
    max_num_batched_tokens: int  # positions in one pass
    vocab_size: int


class Admission:
    """Checks one request against the limits and fills in its max_tokens."""

    def __init__(self, limits: Limits, kv_tokens: int) -> None:
        self.limits = limits
        self.kv_tokens = kv_tokens  # positions that fit into the whole KV cache

    def check(self, request: Request) -> None:
        """Raise BadRequest if it can never be served."""
        self._check_tokens(request)
        prompt, asked = request.prompt_len, request.params.max_tokens
        context = self.limits.max_model_len
        if prompt >= context:
            raise PromptTooLong(
                f"prompt has {prompt} tokens; the limit is {context} for prompt and output together; "
                f"shorten it to at most {context - 1} or raise --max-model-len"
            )
        if asked is not None and prompt + asked > context:
            raise PromptTooLong(
                f"prompt has {prompt} tokens and max_tokens is {asked}: {prompt + asked} together, limit {context}; "
                f"lower max_tokens to {context - prompt} or raise --max-model-len"
            )
        most = min(context, self.kv_tokens + 1) - prompt  # the last token of all is never stored
        if most < 1 or (asked is not None and asked > most):
            total = prompt + (asked or 1)
            raise PromptTooLong(
                f"prompt has {prompt} tokens, with its output {total}; the whole KV cache holds {self.kv_tokens}; "
                f"shorten it, lower max_tokens or raise --kv-memory"
            )
        request.max_tokens = asked if asked is not None else most
        if request.params.min_tokens > request.max_tokens:
            raise BadParameter(
                f"min_tokens is {request.params.min_tokens}, but only {request.max_tokens} tokens fit after this prompt"
            )

    def _check_tokens(self, request: Request) -> None:
        if not request.prompt_len:
            raise EmptyPrompt("the prompt has no tokens; give at least one (a BOS token will do)")
        vocab = self.limits.vocab_size
        for token in (min(request.tokens), max(request.tokens)):
            if not 0 <= token < vocab:
                raise BadParameter(f"token id {token} is not in the vocabulary; ids run from 0 to {vocab - 1}")
        for name, ids in (
            ("logit_bias", request.params.logit_bias or ()),
            ("stop_token_ids", request.params.stop_token_ids),
        ):
            for token in ids:
                if not 0 <= token < vocab:
                    raise BadParameter(f"{name} names token {token}; ids run from 0 to {vocab - 1}")
