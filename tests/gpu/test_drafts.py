"""Rows that verify drafts on a GPU: whatever is drafted, the tokens are those without drafts.

Equality is checked in float32; bfloat16 by the rule of test_engine.py.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.core.params import SamplingParams
from tests.gpu.drive import greedy, opened
from tests.gpu.test_engine import ragged_prompts, scores
from tests.models.test_families import SIZES, saved
from tests.runner.plans import Drive, Guess, Sequenced

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = SIZES["vocab_size"]
MOST = 24
COUNT = 12
DRAFTS = 15
WAYS: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.7, "temperature": 0.3}, {"min_p": 0.1}, {"logprobs": 3},
    {"repetition_penalty": 1.3, "temperature": 0.0}, {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {7: 3.0}}, {"min_tokens": 9, "temperature": 0.0}, {"temperature": 0.0, "logprobs": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.9, "temperature": 0.0, "logprobs": 0},
]  # fmt: skip


def of_all_ways() -> list[SamplingParams]:
    return [SamplingParams(**{"temperature": 0.8, "seed": 77 + at, **way}) for at, way in enumerate(WAYS)]


@contextmanager
def executor(folder: Path, drafts: int = DRAFTS, **options: Any) -> Iterator[Any]:
    """One that expects drafts, over the runner of a whole engine."""
    from shoal.runner.cuda import CudaExecutor

    with opened(folder, **{"dtype": "float32", **options}) as built:
        made = CudaExecutor(built.loop.executor.runner, 200, drafts)  # type: ignore[attr-defined]
        for _ in made.recordings(5):
            pass
        yield made
        made.close()


def drive(made: Any, **more: Any) -> Drive:
    return Drive(made, made.kv.block_size, VOCAB, **{"most": MOST, **more})


def oracle(answers: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], right: float, longest: int) -> Guess:
    """Drafts of any length; each token is right with this probability."""
    source = random.Random(f"{right} {longest}")

    def guess(number: int, tokens: list[int]) -> list[int]:
        at = len(tokens) - len(prompts[number])
        known = [*answers[number][at:], *([3] * longest)][: source.randint(0, longest)]
        return [token if source.random() < right else (token + 1) % VOCAB for token in known]

    return guess


def same(found: list[Sequenced], wanted: list[Sequenced]) -> None:
    assert [one.outputs for one in found] == [one.outputs for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert [each.top_tokens for each in one.logprobs] == [each.top_tokens for each in other.logprobs]
        expected = [each.logprob for each in other.logprobs]
        assert [each.logprob for each in one.logprobs] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2"])
@pytest.mark.parametrize("depth", [1, 2])
def test_right_and_wrong_drafts_change_no_token(name: str, depth: int, tmp_path: Path) -> None:
    """All at once, prompts beside rows that verify; drafts longer than a decode, too."""
    saved(name, tmp_path)
    prompts, params = ragged_prompts(COUNT, seed=3, longest=120), of_all_ways()
    with executor(tmp_path) as made:
        plain = drive(made, depth=depth)
        wanted = plain.run(prompts, params)
        answers = [one.outputs for one in wanted]
        for right, longest in ((1.0, DRAFTS), (0.0, 4), (0.8, DRAFTS), (0.7, 3), (1.0, 20)):
            with_drafts = drive(made, depth=depth)
            same(with_drafts.run(prompts, params, oracle(answers, prompts, right, longest)), wanted)
            assert (max(with_drafts.accepted) > 0) == (right > 0)
            if right == 1.0 and depth == 1:
                assert with_drafts.passes < 0.6 * plain.passes
        assert len(made.graphs) > 10


def test_alone(tmp_path: Path) -> None:
    """One row: other graphs, and the past in many parts."""
    saved("llama", tmp_path)
    with executor(tmp_path) as made:
        for length in (1, 63, 64, 400):
            prompts, params = [[number % 50 for number in range(length)]], [greedy(MOST)]
            wanted = drive(made).run(prompts, params)
            for longest in (1, 3, 7, DRAFTS):
                guess = oracle([wanted[0].outputs], prompts, 0.85, longest)
                same(drive(made, chunk=500).run(prompts, params, guess), wanted)


def test_more_lines_than_graphs_hold(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    prompts, params = ragged_prompts(COUNT, seed=5, longest=60), of_all_ways()
    with executor(tmp_path, drafts=0, max_num_seqs=COUNT) as made:
        wanted = drive(made).run(prompts, params)
        answers = [one.outputs for one in wanted]
        found = drive(made)
        same(found.run(prompts, params, oracle(answers, prompts, 0.9, DRAFTS)), wanted)
        assert sum(found.accepted) > MOST


def test_grammars_mask_every_line(tmp_path: Path) -> None:
    """The tokens allowed depend on the one before; the masks of rejected drafts may allow nothing."""
    saved("llama", tmp_path)
    prompts, params = ragged_prompts(COUNT, seed=6, longest=60), of_all_ways()

    def allow(number: int, tokens: list[int]) -> list[int]:
        if number % 4 == 0:
            return list(range(VOCAB))
        return [] if tokens[-1] % 10 == 9 else [t for t in range(VOCAB) if t % 10 < 9 and (t + tokens[-1]) % 3]

    with executor(tmp_path) as made:
        prompts = [[*prompt, 1] for prompt in prompts]
        wanted = drive(made).run(prompts, params, allow=allow)
        answers = [one.outputs for one in wanted]
        for right in (1.0, 0.8):
            found = drive(made)
            same(found.run(prompts, params, oracle(answers, prompts, right, 5), allow), wanted)
            assert sum(found.accepted) > MOST


def test_bfloat16_chooses_as_well_with_drafts(tmp_path: Path) -> None:
    model = saved("llama", tmp_path).cuda()
    half = type(model)(model.config).to(device="cuda", dtype=torch.bfloat16).eval()
    half.load_state_dict(model.state_dict())
    model.load_state_dict(half.state_dict())  # the same rounded weights, computed in float32
    prompts, params = ragged_prompts(33, seed=5, longest=300), [greedy(MOST)] * 33
    with executor(tmp_path, dtype="bfloat16") as made:
        answers = [one.outputs for one in drive(made).run(prompts, params)]
        found = drive(made)
        with_drafts = found.run(prompts, params, oracle(answers, prompts, 0.9, 6))
    assert sum(found.accepted) > MOST
    for prompt, one in zip(prompts, with_drafts, strict=True):
        wanted = scores(model, prompt, one.outputs)
        error = (scores(half, prompt, one.outputs) - wanted).abs().max()
        chosen = wanted.gather(1, torch.tensor(one.outputs, device="cuda").unsqueeze(1)).squeeze(1)
        assert (wanted.max(-1).values - chosen).max() <= 3 * error
