"""Tensor parallelism on one GPU: one rank over NCCL, its sums recorded in the graphs; and two ranks on the same card.

NCCL refuses two ranks on one card. So the second kind adds up in host memory, over gloo, and its ranks are threads:
slow, but the executors of both ranks are the real ones. Two cards were not tried.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import build as wiring
from shoal import build_follower, build_ranks
from shoal.core.params import SamplingParams
from shoal.models.shard import SplitShard
from shoal.runner import cuda
from shoal.runner.group import DistributedGroup
from shoal.runner.ranks import NoRanks
from tests.gpu.drive import Answers, ask, greedy, opened
from tests.gpu.test_engine import ragged_prompts
from tests.models.test_families import saved
from tests.runner.rank_threads import use_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COUNT = 24


def mixed_params() -> list[SamplingParams]:
    """Greedy, seeded, filtered, with penalties, logprobs and prompt logprobs."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0, "presence_penalty": 0.4, "logit_bias": {5: 1.0}},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    return [SamplingParams(max_tokens=32, ignore_eos=True, seed=n, **kinds[n % len(kinds)]) for n in range(COUNT)]


def answers(folder: Path, **options: Any) -> Answers:
    with opened(folder, dtype="float32", **options) as built:
        first = ask(built, ragged_prompts(COUNT, seed=3, longest=300), mixed_params())
        again = ask(built, ragged_prompts(COUNT, seed=3, longest=300), mixed_params())  # graphs are recorded by now
        assert first.tokens == again.tokens
        return first


@contextmanager
def one_rank_over_nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    group = DistributedGroup(0, 1, Path(mkdtemp()), "cuda")

    def start(*of: Any) -> tuple[NoRanks, SplitShard, Callable[[], None]]:
        return NoRanks(), SplitShard(0, 1, group), group.join

    with monkeypatch.context() as patched:
        patched.setattr(wiring, "start_ranks", start)
        yield
    group.close()


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases", "mistral-window", "qwen3"])
def test_one_rank_over_nccl_gets_the_same_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(name, tmp_path)
    wanted = answers(tmp_path)
    with one_rank_over_nccl(monkeypatch):
        found = answers(tmp_path)
    assert found.tokens == wanted.tokens
    assert found.prompt_logprobs.keys() == wanted.prompt_logprobs.keys()


def test_one_rank_over_nccl_records_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    with one_rank_over_nccl(monkeypatch), opened(tmp_path, dtype="bfloat16") as built:
        for _ in range(3):
            ask(built, [[5, 6, 7]], greedy(20))
        executor: Any = built.loop.executor
        assert len(executor.graphs) > 0


def test_one_rank_over_nccl_swaps_and_verifies_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    options = {"kv_memory": "512KiB", "max_model_len": 512, "when_short": "swap", "speculate": "suffix"}
    wanted = answers(tmp_path, **options)
    with one_rank_over_nccl(monkeypatch):
        assert answers(tmp_path, **options).tokens == wanted.tokens


# ---- two ranks on one card -----------------------------------------------------------------------------------------


class ThroughHost(DistributedGroup):
    """gloo between threads that share a card: every operation goes through host memory."""

    def __init__(self, rank: int, size: int, folder: Path, device: str) -> None:
        super().__init__(rank, size, folder, "cpu")

    def sum_(self, x: Tensor) -> None:
        host = x.cpu()
        super().sum_(host)
        x.copy_(host)

    def gather(self, x: Tensor) -> list[Tensor]:
        return [one.to(x.device) for one in super().gather(x.cpu())]

    def send_(self, x: Tensor) -> None:
        host = x.cpu()
        super().send_(host)
        x.copy_(host)


class Unrecorded:
    """Graphs that are none: operations through host memory cannot be recorded."""

    def run(self, key: object, work: Callable[[], object]) -> bool:
        work()
        return True

    def clear(self) -> None:
        pass

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "llama-llama3"])
@pytest.mark.parametrize("options", [{}, {"when_short": "swap", "kv_memory": "512KiB", "max_model_len": 512}], ids=str)
def test_two_ranks_on_one_card(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(name, tmp_path)
    wanted = answers(tmp_path, **options)
    streams: dict[int, torch.cuda.Stream] = {}  # by thread: one stream for both ranks would be used by two threads

    def own_stream(device: torch.device) -> torch.cuda.Stream:
        made = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return streams.setdefault(threading.get_ident(), made)

    use_threads(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(build_ranks, "DistributedGroup", ThroughHost)
    monkeypatch.setattr(build_follower, "DistributedGroup", ThroughHost)
    monkeypatch.setattr(cuda, "Graphs", Unrecorded)
    monkeypatch.setattr(cuda, "stream_of", own_stream)
    found = answers(tmp_path, tensor_parallel_size=2, **options)
    different = [id for id, tokens in wanted.tokens.items() if tokens != found.tokens[id]]
    assert len(different) <= 1, "sums in another order may tip one of them, not more"
