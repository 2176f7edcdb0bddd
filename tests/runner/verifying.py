"""Drives a real Runner by hand, with and without draft tokens: no scheduler, one row per request, all in every pass."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shoal.core.params import SamplingParams
from shoal.core.plan import SCRIPTED_END, RowStart, StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.request import Logprobs
from shoal.kernels import Ops
from shoal.models import make_model, spec_from_config
from shoal.runner.kvstore import KVStore
from shoal.runner.loader import dummy_weights, to_int8
from shoal.runner.runner import Runner
from shoal.runner.verify import DraftRule
from tests.kernels.draw_rows import late

VOCAB, LONGEST, BLOCK = 320, 512, 16
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

# what a row may generate after these outputs; None: everything
Allowed = Callable[[Sequence[int]], Sequence[int] | None]
# the draft tokens that follow these outputs of a request
Drafts = Callable[["Asked", Sequence[int]], Sequence[int]]


@dataclass(frozen=True)
class Asked:
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    sample: int = 0
    stop_ids: frozenset[int] = frozenset()
    ends_after: int = 0
    allowed: Allowed | None = None


@dataclass
class Answer:
    """What came of it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    failure: str = ""
    accepted: int = 0  # draft tokens

    def __eq__(self, other: object) -> bool:
        """How many draft tokens it took makes no difference."""
        assert isinstance(other, Answer)
        names = ("tokens", "logprobs", "prompt_logprobs", "failure")
        return all(getattr(self, name) == getattr(other, name) for name in names)


def make_runner(
    ops: Ops, dtype: torch.dtype = torch.float32, int8: bool = False, rule: DraftRule | None = None, **config: Any
) -> Runner:
    """A tiny model of random weights, with room for 16 rows."""
    spec = spec_from_config({**CONFIG, **config})
    params = dummy_weights(spec, dtype, "cpu")
    if int8:
        params.convert(to_int8)
    params.convert(ops.prepare)
    store = KVStore(spec, 16 * LONGEST // BLOCK, BLOCK, dtype, "cpu")
    return Runner(make_model(spec, params, ops), store, 16, LONGEST, "cpu", rule)


def row_starts(asked: Sequence[Asked]) -> tuple[RowStart, ...]:
    """One row each, whose blocks are scattered over the whole cache."""
    blocks = list(range(len(asked) * LONGEST // BLOCK))
    random.Random(1).shuffle(blocks)
    each = LONGEST // BLOCK
    return tuple(
        RowStart(
            row,
            0,
            one.prompt,
            len(one.prompt),
            one.params.resolved({}),
            one.seed,
            one.sample,
            one.stop_ids,
            tuple(blocks[row * each : (row + 1) * each]),
            one.params.prompt_logprobs is not None,
            len(one.prompt) + one.ends_after - 1 if one.ends_after else 0,
        )
        for row, one in enumerate(asked)
    )


def plan_of(parts: Sequence[tuple[int, int, Sequence[int], int]], starting: tuple[RowStart, ...] = ()) -> StepPlan:
    """Each part: row, first position, the tokens from there on, how many draws."""

    def numbers(values: Sequence[int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        return np.array(values, dtype=np.int64)

    rows = numbers([row for row, _, _, _ in parts])
    starts, draws = numbers([start for _, start, _, _ in parts]), numbers([draws for _, _, _, draws in parts])
    counts = numbers([len(tokens) for _, _, tokens, _ in parts])
    tokens = numbers([token for _, _, tokens, _ in parts for token in tokens])
    return StepPlan(0, starting, np.empty((0, 3), dtype=np.int64), rows, rows * 0, starts, counts, draws, tokens)


class Driver:
    """Requests under way in a runner."""

    def __init__(self, runner: Runner, asked: Sequence[Asked], drafts: Drafts | None = None) -> None:
        self.runner = runner
        self.asked = asked
        self.drafts = drafts
        self.answers = [Answer() for _ in asked]
        self.passes = 0
        self.rejected = 0  # draft tokens
        starting = row_starts(asked)
        self._pass([(row, 0, one.prompt, 1) for row, one in enumerate(asked)], starting)

    def run(self, count: int) -> list[Answer]:
        """Until each has so many tokens, or has ended before."""
        while parts := [self._part(row, count) for row in range(len(self.asked)) if not self._ended(row, count)]:
            self._pass(parts)
        return self.answers

    def _ended(self, row: int, count: int) -> bool:
        answer, asked = self.answers[row], self.asked[row]
        early = len(answer.tokens) <= asked.params.min_tokens and asked.allowed is None
        stopped = answer.tokens[-1:] == [SCRIPTED_END] or (answer.tokens[-1] in asked.stop_ids and not early)
        return bool(answer.failure) or stopped or len(answer.tokens) >= count

    def _part(self, row: int, count: int) -> tuple[int, int, Sequence[int], int]:
        asked, tokens = self.asked[row], self.answers[row].tokens
        drafts = list(self.drafts(asked, tokens))[: count - len(tokens) - 1] if self.drafts else []
        return row, len(asked.prompt) + len(tokens) - 1, [tokens[-1], *drafts], 1 + len(drafts)

    def _pass(
        self, parts: Sequence[tuple[int, int, Sequence[int], int]], starting: tuple[RowStart, ...] = ()
    ) -> StepResult:
        plan = plan_of(parts, starting)
        result = self.runner.sample(plan, self.runner.forward(plan), self._masks(parts))
        self.passes += 1
        failed, logprobs, first = dict(result.failures), dict(result.logprobs), 0
        for index, (row, accepted) in enumerate(zip(result.rows.tolist(), result.accepted.tolist(), strict=True)):
            answer, asked = self.answers[row], self.asked[row]
            assert 1 <= accepted <= parts[index][3]
            self.rejected += parts[index][3] - accepted
            if index in failed:
                answer.failure = failed[index]
            else:
                answer.accepted += accepted - 1
                self._append(answer, asked, result.tokens[first : first + accepted].tolist(), logprobs, first)
            first += accepted
        assert first == len(result.tokens)
        for index, _, found in result.prompt_logprobs:
            self.answers[parts[index][0]].prompt_logprobs += found
        return result

    def _append(
        self, answer: Answer, asked: Asked, tokens: list[int], logprobs: dict[int, Logprobs], first: int
    ) -> None:
        for index, token in enumerate(tokens, start=first):
            answer.tokens.append(token)
            assert (index in logprobs) == (asked.params.logprobs is not None)
            if index in logprobs:
                answer.logprobs.append(logprobs[index])
            early = len(answer.tokens) <= asked.params.min_tokens and asked.allowed is None
            if token == SCRIPTED_END or (token in asked.stop_ids and not early):
                return  # as the scheduler drops what was drawn after the end

    def _masks(self, parts: Sequence[tuple[int, int, Sequence[int], int]]) -> LateMasks | None:
        """The mask of each line: after the outputs and the drafts before it."""
        found: dict[int, Sequence[int]] = {}
        line = 0
        for row, _, ids, draws in parts:
            allowed, outputs = self.asked[row].allowed, self.answers[row].tokens
            for ahead in range(draws):
                drafts = ids[len(ids) - draws + 1 :][:ahead]
                tokens = allowed([*outputs, *drafts]) if allowed is not None else None
                if tokens is not None:
                    found[line] = tokens
                line += 1
        return late(found, VOCAB) if found else None
