"""The runner: one StepPlan in, one StepResult out.

One ragged forward per pass: linear layers over all tokens of all requests, attention per sequence over its blocks,
logits only for the positions that choose a token. Knows rows, not requests; never sees the scheduler.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import SCRIPTED_END, Ints, StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.request import Logprobs
from shoal.models import Model
from shoal.runner.copier import Copier
from shoal.runner.inputs import PassInputs, RowTables
from shoal.runner.kvstore import KVStore
from shoal.runner.sampler import Sampler, logprobs_of

NOT_FINITE = "the model's scores are not finite numbers; its weights may be damaged, or every token is forbidden"
FORBIDDEN = "the grammar allows no token of the model's vocabulary here; change the grammar"
LOGITS_AT_ONCE = 64  # lines of logits held at a time for prompt logprobs

ForwardState = tuple[Tensor, PassInputs]  # hidden states of a pass, and what they were computed from
PromptLogprobs = tuple[tuple[int, int, tuple[Logprobs, ...]], ...]


class Runner:
    """Computes passes one after the other, on the calling thread."""

    def __init__(self, model: Model, kv: KVStore, rows: int, max_model_len: int, device: torch.device | str) -> None:
        self.model = model
        self.kv = kv
        blocks_per_row = -(-max_model_len // kv.block_size)
        self.tables = RowTables(rows, blocks_per_row, kv.block_size, kv.scratch, device)
        self.sampler = Sampler(rows, model.spec.vocab_size, device, model.ops)
        self.copier = Copier(kv)
        self._prompts: dict[int, tuple[tuple[int, ...], int]] = {}  # rows that want prompt logprobs: prompt, how many

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> ForwardState | None:
        """Hidden states of all positions of the pass; None if it has no rows."""
        self.update(plan)
        return self.compute(plan) if len(plan.rows) else None

    def update(self, plan: StepPlan) -> None:
        """Take in what the plan changes: copies of blocks begin, rows start or grow."""
        for order in plan.copies:
            self.copier.submit(order)
        self.tables.update(plan)
        for start in plan.starting:
            self.sampler.start(start)
            self._prompts.pop(start.row, None)
            if start.wants_prompt_logprobs:
                self._prompts[start.row] = (start.tokens[: start.prompt_len], start.params.prompt_logprobs or 0)

    @property
    def wants_hidden(self) -> bool:
        """Whether somebody's prompt logprobs are still to be computed."""
        return bool(self._prompts)

    def compute(self, plan: StepPlan) -> tuple[Tensor, PassInputs]:
        """The forward pass itself."""
        inputs = self.tables.gather(plan)
        return self.model.forward(inputs.ids, inputs.batch, self.kv.layers), inputs

    @torch.inference_mode()
    def sample(self, plan: StepPlan, begun: ForwardState | None, masks: LateMasks | None) -> StepResult:
        """Tokens for the rows that choose one."""
        if begun is None:
            none = np.empty(0, dtype=np.int64)
            done, broken = self.copier.take(all_of_them=True)
            return StepResult(plan.step, none, none, none, none, copies_done=done, copies_failed=broken)
        hidden, inputs = begun
        rows = inputs.sampling_rows
        tokens = np.empty(0, dtype=np.int64)
        logprobs: list[tuple[int, Logprobs]] = []
        failures: list[tuple[int, str]] = []
        if rows.size:
            logits = self.model.logits(chosen_rows(hidden, inputs.sampling))
            chosen, best, logprobs = self.sampler.sample(logits, rows, inputs.sampling_positions, masks)
            self.tables.note(rows, chosen)
            failures = failed(best, rows, masks)
            tokens = chosen.cpu().numpy()
            scripted = self.sampler.rows.ends_at[rows] == inputs.sampling_positions
            if scripted.any():
                tokens = np.where(scripted, SCRIPTED_END, tokens)
        of_prompts = self.prompt_logprobs(plan, hidden, inputs.batch.starts)
        done, broken = self.copier.take()  # last of all: what is taken must be told
        return StepResult(
            plan.step,
            rows,
            plan.generations[plan.draws > 0],
            np.ones_like(rows),
            tokens,
            tuple(logprobs),
            of_prompts,
            tuple(failures),
            done,
            broken,
            padded=len(inputs.ids) - len(plan.tokens),
        )

    def prompt_logprobs(self, plan: StepPlan, hidden: Tensor, starts: Sequence[int]) -> PromptLogprobs:
        """What the model thought of each prompt token, given those before it; starts: of each row in hidden."""
        found: list[tuple[int, int, tuple[Logprobs, ...]]] = []
        if not self._prompts:
            return ()
        for place, (row, start, count) in enumerate(
            zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True)
        ):
            if row not in self._prompts:
                continue
            prompt, top = self._prompts[row]
            last = min(start + count, len(prompt) - 1)  # the last prompt token predicts output, not prompt
            values: list[Logprobs] = []
            for at in range(start, last, LOGITS_AT_ONCE):
                until = min(at + LOGITS_AT_ONCE, last)
                offset = starts[place] - start
                logits = self.model.logits(hidden[offset + at : offset + until])
                targets = torch.tensor(prompt[at + 1 : until + 1], device=hidden.device)
                values += logprobs_of(logits, targets, top)
            if values:
                found.append((place, start + 1, tuple(values)))
            if start + count >= len(prompt):
                del self._prompts[row]
        return tuple(found)


def chosen_rows(hidden: Tensor, places: Ints) -> Tensor:
    """Those rows of the hidden states: where they are, if that is all of them."""
    if len(places) == len(hidden):  # they are in order, so each is itself
        return hidden
    return hidden[torch.from_numpy(places).to(hidden.device)]


def failed(best: Tensor, rows: Ints, masks: LateMasks | None) -> list[tuple[int, str]]:
    """(place, reason) of the lines whose best score is no number."""
    sound = np.isfinite(best.cpu().numpy())
    if sound.all():
        return []
    masked = set() if masks is None else set(masks.rows[~masks.allowed.any(axis=1)].tolist())
    places = np.flatnonzero(~sound).tolist()
    return [(place, FORBIDDEN if int(rows[place]) in masked else NOT_FINITE) for place in places]
