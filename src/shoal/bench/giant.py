"""A giant prompt arrives among running streams: what each prefill policy does to the streams and to the prompt.

Inline stalls every stream for one long pass, exclusive pauses them, chunked slows them a little while the prompt takes
slightly longer. Takes a make_engine; knows the experiment, not how it is drawn.
"""

from collections.abc import Callable
from typing import Any

from shoal.bench.cpu_noise import NoiseWatch, noise_figures
from shoal.bench.record import RunRecord
from shoal.bench.replay import Replay
from shoal.engine.loop import EngineLoop
from shoal.workload.prompts import make_prompts
from shoal.workload.traces import TraceRequest

WAYS = ("inline", "exclusive", "chunked")


def run_giant(
    make_engine: Callable[[dict[str, Any]], EngineLoop],
    vocab_size: int,
    *,
    streams: int = 16,
    giant: int = 2048,
    warm_passes: int = 12,
    output: int = 48,
) -> dict[str, RunRecord]:
    """The same requests under every policy: `streams` short prompts, then the giant once all of them decode."""
    found = {}
    for way in WAYS:
        loop = make_engine({"prefill": way, "max_num_seqs": streams + 1, "prefix_caching": False})
        try:
            found[way] = _one(loop, vocab_size, way, streams, giant, warm_passes, output)
        finally:
            loop.close()
    return found


class GiantReplay(Replay):
    """The last request arrives when every other has `warm_passes` output tokens."""

    warm_passes = 0

    def _arrive(self) -> None:
        warm = min(len(record.token_s) for record in self.recorder.requests[:-1]) >= self.warm_passes
        self.users = len(self.trace) if warm else len(self.trace) - 1
        super()._arrive()


def _one(
    loop: EngineLoop, vocab_size: int, way: str, streams: int, giant: int, warm_passes: int, output: int
) -> RunRecord:
    trace = [TraceRequest(0.0, 8, output)] * streams + [TraceRequest(0.0, giant, 4)]
    replay = GiantReplay(loop, trace, make_prompts(trace, vocab_size), max_tokens=output, users=streams + 1)
    replay.warm_passes = warm_passes
    watch = NoiseWatch()
    seconds, busy_s = replay.run()
    records, passes, noise = replay.recorder.requests, replay.recorder.passes, watch.noise()
    return RunRecord(way, way, 0.0, {"prefill": way}, streams + 1, records, passes, seconds, busy_s, noise)


def giant_rows(runs: dict[str, RunRecord]) -> list[dict[str, Any]]:
    """Largest gap of the streams and the giant's first token, with ratios to inline."""
    rows: list[dict[str, Any]] = []
    for way, run in runs.items():
        *streams, giant = run.requests
        gap_s = max(gap for stream in streams for gap in stream.gaps_s)
        rows.append(
            {"prefill": way, "largest_gap_s": gap_s, "giant_ttft_s": giant.ttft_s or 0.0} | noise_figures(run.noise)
        )
    inline = next(row for row in rows if row["prefill"] == "inline")
    for row in rows:
        row["gap_of_inline"] = row["largest_gap_s"] / inline["largest_gap_s"]
        row["ttft_of_inline"] = row["giant_ttft_s"] / inline["giant_ttft_s"]
    return rows
