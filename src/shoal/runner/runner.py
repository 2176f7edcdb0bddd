"""The runner: one StepPlan in, one StepResult out.

One ragged forward per pass: linear layers over all tokens of all requests, attention per sequence over its blocks,
logits only for the positions that draw a token. Knows rows, not requests; never sees the scheduler.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import Ints, StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.request import Logprobs
from shoal.models import Model
from shoal.runner.copier import Copier
from shoal.runner.draws import PassDraws, draws_of
from shoal.runner.inputs import PassInputs, RowTables
from shoal.runner.kvstore import KVStore
from shoal.runner.results import NO_TOKENS, DrawnTokens, PromptLogprobs, step_result
from shoal.runner.sampler import Sampler, logprobs_of
from shoal.runner.verify import AcceptedTokens, DraftRule, EqualTokens, accepted_tokens

LOGITS_AT_ONCE = 64  # lines of logits held at a time for prompt logprobs


class ForwardState(NamedTuple):
    """A pass whose tokens are not chosen yet."""

    hidden: Tensor  # states of all positions
    inputs: PassInputs


class Runner:
    """Computes passes one after the other, on the calling thread; `rule` says which draft tokens are accepted."""

    def __init__(
        self,
        model: Model,
        kv: KVStore,
        rows: int,
        max_model_len: int,
        device: torch.device | str,
        rule: DraftRule | None = None,
        most_drafts: int = 0,
        drafts_for: RowTables | None = None,
    ) -> None:
        """most_drafts: draft tokens of a row that can be on the device; drafts_for: the tables of the model
        that this one drafts for."""
        self.model = model
        self.kv = kv
        sizes = rows, -(-max_model_len // kv.block_size), kv.block_size, kv.scratch
        self.tables = RowTables(*sizes, device, model.shard.agreed, most_drafts, drafts_for)
        self.sampler = Sampler(rows, model.spec.vocab_size, device, model.ops)
        self.copier = Copier(kv)
        self.rule = rule or EqualTokens()
        self._prompts: dict[int, tuple[tuple[int, ...], int]] = {}  # rows with prompt logprobs: prompt, how many

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> ForwardState | None:
        """Hidden states of all positions of the pass; None if it has no rows."""
        self.update(plan)
        return self.compute(plan, draws_of(plan)) if len(plan.rows) else None

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's changes: queue copies of blocks, start rows, add blocks to them."""
        for order in plan.copies:
            self.copier.submit(order)
        self.tables.update(plan)
        for start in plan.starting:
            self.sampler.start(start)
            self._prompts.pop(start.row, None)
            if start.needs_prompt_logprobs:
                self._prompts[start.row] = (start.tokens[: start.prompt_len], start.params.prompt_logprobs or 0)

    @property
    def needs_hidden(self) -> bool:
        """Whether some row's prompt logprobs are still to be computed, from the hidden states of all positions."""
        return bool(self._prompts)

    def compute(self, plan: StepPlan, draws: PassDraws) -> ForwardState:
        """The forward pass itself."""
        if draws.are_late:
            draws = draws.settled(self.tables.drafted.cpu().numpy())
        inputs = self.tables.gather(plan, draws)
        return ForwardState(self.model.forward(inputs.ids, inputs.batch, self.kv.layers), inputs)

    @torch.inference_mode()
    def sample(self, plan: StepPlan, forward: ForwardState | None, masks: LateMasks | None) -> StepResult:
        """The result of a pass: tokens for the rows that draw."""
        ends_at = self.sampler.rows.ends_at
        if forward is None:
            draws, copies = draws_of(plan), self.copier.take(all_of_them=True)
            return step_result(plan, draws, NO_TOKENS, self.accepted(draws, NO_TOKENS), ends_at, masks, copies)
        hidden, inputs = forward
        draws, drawn = inputs.draws, NO_TOKENS
        if draws.lines:
            logits = self.model.logits(scored_states(hidden, inputs.scored))
            expected = draws.expected if draws.has_drafts else None
            tokens, best, logprobs = self.sampler.sample(logits, draws.line_rows, draws.positions, masks, expected)
            drawn = DrawnTokens(tokens.cpu().numpy(), best.cpu().numpy(), logprobs)
        accepted = self.accepted(draws, drawn)
        self.tables.note(draws.rows, accepted.tokens[np.cumsum(accepted.counts) - 1])
        if plan.kept >= 0:
            self.tables.keep(plan.kept)
        of_prompts = self.prompt_logprobs(plan, hidden, inputs.batch.starts)
        copies = self.copier.take()  # last of all: a failure before this loses none of them
        padded = len(inputs.ids) - len(plan.tokens)
        return step_result(plan, draws, drawn, accepted, ends_at, masks, copies, of_prompts, padded)

    def accepted(self, draws: PassDraws, drawn: DrawnTokens) -> AcceptedTokens:
        """What the rows yield of the tokens drawn."""
        return accepted_tokens(draws, drawn.tokens, drawn.best, self.rule, self.sampler.state)

    def prompt_logprobs(self, plan: StepPlan, hidden: Tensor, starts: Sequence[int]) -> PromptLogprobs:
        """Logprobs of each prompt token, given those before it; starts: where each row begins in hidden."""
        found: list[tuple[int, int, tuple[Logprobs, ...]]] = []
        if not self._prompts:
            return ()
        for index, (row, start, count) in enumerate(
            zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True)
        ):
            if row not in self._prompts:
                continue
            prompt, top = self._prompts[row]
            last = min(start + count, len(prompt) - 1)  # the last prompt token predicts output, not prompt
            values: list[Logprobs] = []
            for at in range(start, last, LOGITS_AT_ONCE):
                until = min(at + LOGITS_AT_ONCE, last)
                offset = starts[index] - start
                values += self.prompt_values(hidden[offset + at : offset + until], prompt[at + 1 : until + 1], top)
            if values:
                found.append((index, start + 1, tuple(values)))
            if start + count >= len(prompt):
                del self._prompts[row]
        return tuple(found)

    def prompt_values(self, states: Tensor, targets: Sequence[int], top: int) -> list[Logprobs]:
        """Logprobs of these tokens, each given the hidden state before it."""
        return logprobs_of(self.model.logits(states), torch.tensor(targets, device=states.device), top)


def scored_states(hidden: Tensor, scored: Ints) -> Tensor:
    """The hidden states at these indexes, without a copy if that is all of them."""
    if len(scored) == len(hidden):  # indexes are in order
        return hidden
    return hidden[torch.from_numpy(scored).to(hidden.device)]
