"""Runs of simulated engines with a recording, as shoal simulate makes them, without a profile and without plots."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.bench.live_tape import LiveTape
from shoal.bench.record import Promise, RunRecord
from shoal.bench.recorder import RunRecorder
from shoal.core.work import DeviceRates, ModelWork
from shoal.sim.request import RequestMaker
from shoal.sim.virtual import OpenArrivals, VirtualServer
from shoal.workload.traces import TraceRequest
from tests.sim.made import engine, trace

PROMISE = Promise(0.5, 0.05)
WORK, RATES = ModelWork(1e3, 1e3, 10.0, 1e4, 10.0), DeviceRates(1e8, 1e7)
TENANTS = ("ada", "bob", "cleo")


def requests(count: int = 40, rate: float = 60.0, **lengths: int) -> list[TraceRequest]:
    return [replace(one, tenant=TENANTS[number % 3]) for number, one in enumerate(trace(count, rate, **lengths))]


def recorded_run(
    label: str = "shoal", arriving: Sequence[TraceRequest] = (), replicas: int = 1, **settings: Any
) -> RunRecord:
    """One run of these requests. With one pass in flight, so that no row is computed for a request that has ended."""
    tape = LiveTape(PROMISE, WORK, RATES)
    recorder = RunRecorder(tape=tape)
    loops = [engine(check=False, depth=1, **{"max_num_seqs": 4, **settings}) for _ in range(replicas)]
    for loop in loops:
        tape.follow(loop.scheduler)
    server = VirtualServer(loops, recorder, RequestMaker(200, 16))
    seconds = server.run(OpenArrivals(arriving or requests()))
    found = recorder.requests, recorder.passes, seconds, recorder.busy_s
    chosen = {"batching": "continuous", **settings}
    return RunRecord(label, label, 1.0, chosen, 4, *found, live=recorder.live())
