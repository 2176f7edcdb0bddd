"""What the host does between two passes with drafts, while a GPU would wait for it: µs of CPU time, by stage.

    python benchmarks/host_gap.py [SPECULATE [ROWS ...]]       (synthetic:0.7 1 8)

The scheduler, the loop and the GPU's executor are the real ones; the GPU is not: stand-ins for streams, events and
graphs take the time of a pass and compute nothing, so that this runs anywhere. Calls of CUDA are not in the figures.
All tokens are the same, which ngram and suffix foresee.
The CPU time of the calling thread is counted, so that other programs disturb little.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import shoal.runner.cuda as cuda
import shoal.runner.graphs as graphs
import shoal.runner.runner as runners
from shoal.config.engine import EngineConfig
from shoal.core.clock import WallClock
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.engine.loop import EngineLoop
from shoal.models.shard import WHOLE
from shoal.runner.runner import Runner
from shoal.runner.verify import CoinToss
from shoal.sched.admission import Limits
from shoal.sched.make import make_scheduler
from shoal.spec.make import make_drafter

VOCAB, HIDDEN, BLOCKS, DRAFTS, OUTPUT = 128_256, 64, 8000, 4, 900
STAGES = ("result", "commit", "plan", "sent", "launched")


class Gpu:
    """When it has done all that was queued."""

    free_s = 0.0


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = max(time.perf_counter(), Gpu.free_s)

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at_s - time.perf_counter()))
        Timeline.begin()

    def elapsed_time(self, other: "Event") -> float:
        return (other.at_s - self.at_s) * 1000


class Replay:
    """A graph that takes some time."""

    def __init__(self, seconds: float, is_body: bool) -> None:
        self.seconds, self.is_body = seconds, is_body

    def replay(self) -> None:
        if self.is_body:
            Timeline.end()
        Gpu.free_s = max(time.perf_counter(), Gpu.free_s) + self.seconds


class Nothing:
    """Any method, which does nothing; and a context."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class NoCopies(Nothing):
    def take(self, all_of_them: bool = False) -> tuple[tuple[()], tuple[()]]:
        return (), ()


class NoOps(Nothing):
    long_context = 8192

    @property
    def pass_ops(self) -> "NoOps":
        return self

    def queries_per_block(self, *_: object) -> int:
        return 32

    def few_queries(self, *_: object) -> tuple[int, ...]:
        return 1, 4, 8, 16

    def place_tokens(self, known: Any, *_: object) -> tuple[Any, Any, Any]:
        return known, known, known


class NoModel(Nothing):
    ops = NoOps()
    shard = WHOLE
    dtype = torch.bfloat16
    spec = SimpleNamespace(heads=32, kv_heads=8, head_dim=128, hidden_size=HIDDEN, vocab_size=VOCAB)

    def forward(self, ids: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.zeros(len(ids), HIDDEN, dtype=torch.bfloat16)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Timeline:
    """CPU time since the device was done, at each stage of the passes with drafts."""

    since_s = 0.0
    stages: dict[str, float] = {}  # noqa: RUF012 (one timeline for all)
    drafts = False  # the pass under way verifies some
    all: list[dict[str, float]] = []  # noqa: RUF012

    @classmethod
    def begin(cls) -> None:
        cls.stages, cls.since_s = {}, time.thread_time()

    @classmethod
    def mark(cls, stage: str) -> None:
        cls.stages.setdefault(stage, time.thread_time() - cls.since_s)  # of a pass that is not planned yet: the first

    @classmethod
    def end(cls) -> None:
        cls.mark("launched")
        if cls.drafts and all(stage in cls.stages for stage in STAGES):
            cls.all.append(cls.stages)


def watch(owner: Any, name: str, stage: str) -> None:
    """Mark the stage whenever this method returns."""
    method = getattr(owner, name)

    def marked(*args: Any) -> Any:
        if stage == "sent":
            Timeline.drafts = bool((args[0].draws > 1).any())
        found = method(*args)
        Timeline.mark(stage)
        return found

    setattr(owner, name, marked)


def pretend() -> None:
    """Put the stand-ins where the executor looks for CUDA."""
    empty = torch.empty
    torch.empty = lambda *size, pin_memory=False, **more: empty(*size, **more)  # type: ignore[assignment]
    torch.cuda.Event, torch.cuda.stream, torch.cuda.synchronize = Event, Nothing, Nothing  # type: ignore[misc,assignment]
    torch.cuda.graph_pool_handle = Nothing  # type: ignore[assignment]
    cuda.stream_of = Nothing  # type: ignore[assignment]
    runners.Copier = NoCopies  # type: ignore[misc,assignment]

    def record(self: graphs.Graphs, work: Any) -> Replay:
        is_body = work.func.__name__ == "_body"
        return Replay(0.0043 + 2e-5 * work.args[1].tokens if is_body else 0.00025, is_body)

    graphs.Graphs._record = record  # type: ignore[assignment,method-assign]


def make_loop(speculate: str, rows: int) -> EngineLoop:
    settings = {
        "model": "none", "speculate": speculate, "draft_tokens": DRAFTS, "max_num_seqs": rows,
        "prefix_caching": False,
    }  # fmt: skip
    config = EngineConfig.from_mapping(settings).settled("cpu")
    scheduler = make_scheduler(config, Limits(4096, rows, 2048, VOCAB), BLOCKS, 0, make_drafter(config.speculation))
    store = SimpleNamespace(block_size=16, scratch=0, data=torch.zeros(1, dtype=torch.bfloat16), layers=[])
    model: Any = NoModel()
    synthetic = config.speculation.synthetic
    rule = CoinToss(synthetic) if synthetic is not None else None
    runner = Runner(model, store, scheduler.tables.rows.count, 4096, "cpu", rule)  # type: ignore[arg-type]
    executor = cuda.CudaExecutor(runner, 2048, DRAFTS)
    for positions, seconds in executor.recordings(rows):
        scheduler.policies.drafts.rehearsed(positions, seconds)
    for owner, name, stage in (
        (executor, "result", "result"), (scheduler, "commit", "commit"), (scheduler, "plan", "plan"),
        (executor, "_send", "sent"),
    ):  # fmt: skip
        watch(owner, name, stage)
    return EngineLoop(scheduler, executor, WallClock(), depth=2)


def run(speculate: str, rows: int) -> None:
    loop = make_loop(speculate, rows)
    Timeline.all.clear()
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    for number in range(rows):
        loop.submit(Request(str(number), list(range(1, 129)), params, seed=number))
    gc.disable()
    while not loop.idle:
        loop.step()
    gc.enable()
    passes = Timeline.all[20:]
    if not passes:
        print(f"{rows:>5}  no passes with drafts: the host was too slow for them; try again while the machine is quiet")
        return
    times = [statistics.median(one[stage] for one in passes) * 1e6 for stage in STAGES]
    print(f"{rows:>5} {len(passes):>7} " + "".join(f"{at:>9.0f}" for at in times), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    pretend()
    print("µs of CPU time from the end of a pass to the end of each stage of the next, medians")
    print(" rows  passes " + "".join(f"{stage:>9}" for stage in STAGES))
    named, *asked = sys.argv[1:] or ["synthetic:0.7"]
    for number_of_rows in asked or ("1", "8"):
        run(named, int(number_of_rows))
