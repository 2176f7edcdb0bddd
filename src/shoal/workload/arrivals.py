"""Arrivals: when each request arrives.

replay    as in the trace, with time scaled
poisson   independent arrivals at a rate
gamma     bursts: gaps with a coefficient of variation above 1 (below 1: more even than Poisson)
closed    a fixed number of users, each with one request at a time (times are 0; the driver delays requests)
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shoal.errors import BadConfig
from shoal.workload.traces import TraceRequest


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise BadConfig(f"{name} must be a number above 0, not {value}")


def cv_of(arrivals: str) -> float | None:
    """The coefficient of variation of the gaps that `--arrivals` names; None: the trace's own times.

    >>> cv_of("poisson"), cv_of("gamma:3"), cv_of("replay")
    (1.0, 3.0, None)
    """
    kind, _, number = arrivals.partition(":")
    if arrivals == "replay":
        return None
    if arrivals == "poisson":
        return 1.0
    try:
        cv = float(number) if kind == "gamma" else math.nan
    except ValueError:
        cv = math.nan
    if not 0 < cv < math.inf:
        raise BadConfig(
            f"arrivals must be poisson, replay or gamma:CV, with a CV above 0 such as gamma:3; not {arrivals}"
        )
    return cv


def replay(requests: list[TraceRequest], time_scale: float = 1.0) -> list[TraceRequest]:
    """The trace's own times; a scale of 0.5 makes requests arrive twice as fast."""
    _positive("time scale", time_scale)
    return [replace(request, at_s=request.at_s * time_scale) for request in requests]


def replay_at_rate(requests: list[TraceRequest], rate: float) -> list[TraceRequest]:
    """The trace's own pattern of arrivals, scaled to a mean rate in requests per second."""
    _positive("rate", rate)
    span_s = max((request.at_s for request in requests), default=0.0)
    if span_s <= 0:
        raise BadConfig("this trace has no arrival times to replay; use Poisson arrivals")
    return replay(requests, (len(requests) - 1) / rate / span_s)


def poisson(requests: list[TraceRequest], rate: float, seed: int = 0) -> list[TraceRequest]:
    """Independent arrivals, `rate` per second on average."""
    return gamma(requests, rate, 1.0, seed)


def gamma(requests: list[TraceRequest], rate: float, cv: float, seed: int = 0) -> list[TraceRequest]:
    """Gaps from a Gamma distribution with this coefficient of variation; 1 is Poisson, 5 is very bursty."""
    return list(spaced(requests, rate, cv, seed))


def spaced(requests: Iterable[TraceRequest], rate: float, cv: float, seed: int = 0) -> Iterator[TraceRequest]:
    """As gamma(), one by one."""
    _positive("rate", rate)
    _positive("coefficient of variation", cv)
    source = random.Random(seed)
    shape = 1 / cv**2
    at_s = 0.0
    for request in requests:
        yield replace(request, at_s=at_s)
        at_s += source.gammavariate(shape, 1 / (shape * rate))


def repeated(requests: Sequence[TraceRequest], count: int) -> Iterator[TraceRequest]:
    """The first `count` requests of a trace that begins again whenever it ends. Shared prefixes differ each time.

    >>> [(one.at_s, one.prefix) for one in repeated([TraceRequest(0, 9, 1, (7,), 4), TraceRequest(6, 9, 1)], 4)]
    [(0.0, (7,)), (6.0, ()), (12.0, (8,)), (18.0, ())]
    """
    span_s = requests[-1].at_s * (1 + 1 / max(len(requests) - 1, 1))  # and one gap more
    most = max((id for one in requests for id in one.prefix), default=0) - min(
        (id for one in requests for id in one.prefix), default=0
    )
    for number in range(count):
        turn, index = divmod(number, len(requests))
        one = requests[index]
        prefix = tuple(id + turn * (most + 1) for id in one.prefix) if turn else one.prefix
        yield replace(one, at_s=one.at_s + turn * span_s, prefix=prefix)


def at_once(requests: list[TraceRequest]) -> list[TraceRequest]:
    """All at time 0: for a closed loop, or to measure throughput."""
    return [replace(request, at_s=0.0) for request in requests]
