"""The doctor: sicknesses made on purpose, on engines of the simulator; each is named, and its cure helps."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from shoal.cli.doctor import in_words
from shoal.config.engine import EngineConfig
from shoal.core.events import PassEvents
from shoal.errors import BadConfig
from shoal.obs.recent import RecentWork
from shoal.sched.scheduler import Scheduler
from shoal.sim.cost import DeviceTimes, HostTimes
from shoal.sim.doctor import Sickness, diagnose, examine_engine
from shoal.sim.engines import simulated_loop
from shoal.sim.front import FrontTimes
from shoal.sim.profile import Profile, read_profile
from shoal.sim.request import RequestMaker
from shoal.sim.seen import SeenEngine, profile_of, read_seen, timed_passes, trace_of
from shoal.sim.virtual import OpenArrivals, VirtualServer
from shoal.workload.traces import TraceRequest
from tests.sim.made import trace

# weights are read once per pass: passes of up to 64 positions take hardly longer than one of 1
DEVICE = DeviceTimes(((1, 0.010), (64, 0.012)), ((1, 0.010), (64, 0.012), (1024, 0.100)), read_s=1e-7, pair_s=1e-9)


def made_profile(host_s: float = 1e-4, kv_tokens: int = 20_000) -> Profile:
    return replace(
        read_profile("smollm2-135m-cpu"),
        device=DEVICE,
        host=HostTimes(host_s, 1e-6, 1e-6),
        front=FrontTimes(),
        kv_tokens=kv_tokens,
    )


class Recording:
    """A server's observer of passes, on virtual time."""

    def __init__(self) -> None:
        self.recent = RecentWork()

    def arrived(self, number: int, one: TraceRequest, at_s: float) -> None: ...

    def refused(self, number: int, kind: str) -> None: ...

    def passed(self, events: PassEvents, scheduler: Scheduler) -> None:
        self.recent.take(events)

    def delivered(self, events: PassEvents, at_s: float) -> None: ...


def server(profile: Profile, requests: Sequence[TraceRequest], **settings: Any) -> SeenEngine:
    """What a server with these settings would answer after this load."""
    config = EngineConfig.from_mapping({"max_num_seqs": 16, "max_num_batched_tokens": 64, **settings})
    observer = Recording()
    loop = simulated_loop(profile, config)
    make = RequestMaker(max(one.output for one in requests), loop.scheduler.kv.block_size)
    VirtualServer([loop], observer, make).run(OpenArrivals(requests))
    assert observer.recent.tracked == 0
    default = EngineConfig()
    about = {
        "model": asdict(profile.model),
        "device": profile.card.name,
        "kind": profile.card.kind,
        "memory_bytes": profile.card.memory_bytes,
        "dtype": profile.dtype,
        "depth": loop.depth,
        "kv_tokens": loop.scheduler.kv.pool.total * config.block_size,
        "places": config.slots,
        "budget": config.pass_tokens,
        "settings": {name: value for name, value in asdict(config).items() if value != getattr(default, name)},
        "utilisation": {},
        "flop_s": None,
        "bytes_s": None,
        "copy_block_s": {"out": None, "in": None},
    }
    answer = {"engines": [{"engine": 0, **about, **observer.recent.state()}]}
    return read_seen(json.loads(json.dumps(answer)), "http://x")[0]


def named(seen: SeenEngine, name: str) -> Sickness:
    found, why = examine_engine(seen)
    assert not why
    (one,) = [finding for finding in found if finding.name == name]
    return one


def helps(finding: Sickness, figure: str) -> None:
    assert finding.before is not None
    assert finding.after is not None
    assert getattr(finding.after, figure) < 0.9 * getattr(finding.before, figure)


def short(count: int, rate: float, outputs: int = 30, longest: int = 40) -> list[TraceRequest]:
    return trace(count, rate=rate, longest=longest, outputs=outputs)


def test_a_healthy_server_has_no_sickness() -> None:
    seen = server(made_profile(), short(60, rate=5), depth=2)
    assert examine_engine(seen) == ([], "")
    assert in_words([], "") == ["nothing limits it"]


def test_too_few_places() -> None:
    seen = server(made_profile(), short(80, rate=30), max_num_seqs=4, depth=2)
    found = named(seen, "the queue is long because all places are taken")
    assert found.cure.keys() == {"max_num_seqs"}
    assert found.cure["max_num_seqs"] > 4
    helps(found, "ttft_p99_s")


def test_too_little_kv_memory() -> None:
    profile = made_profile(kv_tokens=640)
    seen = server(profile, short(60, rate=20, longest=150), memory="reserve", when_short="wait", depth=2)
    found = named(seen, "the queue is long because KV memory is full")
    helps(found, "ttft_p99_s")


def test_requests_that_preempt_each_other() -> None:
    profile = made_profile(kv_tokens=480)
    load = trace(30, rate=40, longest=40, outputs=150)
    seen = server(profile, load, prefix_caching=False, watermark=0.0, depth=2)
    found = named(seen, "requests preempt each other")
    helps(found, "e2e_mean_s")


def test_a_giant_prompt_among_streams() -> None:
    streams = short(60, rate=15, outputs=60)
    giants = [TraceRequest(0.5 + number, 1000, 4) for number in range(4)]
    load = sorted([*streams, *giants], key=lambda one: one.at_s)
    seen = server(made_profile(), load, prefill="inline", depth=2)
    found = named(seen, "long prompts stall the other streams")
    assert found.cure == {"prefill": "chunked"}
    helps(found, "gap_most_s")


def test_passes_that_are_too_small() -> None:
    load = short(40, rate=8, outputs=5, longest=300)
    seen = server(made_profile(), load, max_num_batched_tokens=8, max_num_seqs=8, depth=2)
    found = named(seen, "passes are too small")
    assert found.cure["max_num_batched_tokens"] >= 64
    helps(found, "ttft_p50_s")


def test_a_device_that_waits_for_the_host() -> None:
    seen = server(made_profile(host_s=0.008), short(60, rate=8), depth=1)
    found = named(seen, "the device waits for the host")
    assert found.cure == {"depth": 2}
    helps(found, "e2e_mean_s")


def test_padding() -> None:
    seen = server(made_profile(), short(60, rate=20), layout="padded", prefill="inline", depth=1)
    found = named(seen, "padding takes the device's time")
    assert found.cure["layout"] == "ragged"
    helps(found, "e2e_mean_s")


def test_a_prefix_cache_that_is_off_or_has_no_room() -> None:
    off = server(made_profile(), trace(40, rate=5, longest=300, outputs=20), prefix_caching=False, depth=2)
    assert "it is off" in named(off, "the prefix cache never hits").evidence
    load = [TraceRequest(number * 0.05, 260, 30) for number in range(60)]
    crowded = server(made_profile(kv_tokens=608), load, depth=2)
    assert "overwritten before they are needed" in named(crowded, "the prefix cache never hits").evidence


def test_a_profile_from_traffic_has_the_costs_of_the_engine() -> None:
    profile = made_profile()
    load = trace(150, rate=12, longest=200, outputs=40)
    seen = server(profile, load, depth=1)
    found = profile_of(seen, "seen", "shoal calibrate")
    assert found.error < 0.03
    assert found.held_back["passes"] > 50
    for one in timed_passes(seen)[::37]:
        assert found.costs.device_s(one.size) == pytest.approx(profile.costs.device_s(one.size), rel=0.05)
    assert found.host.pass_s == pytest.approx(1e-4, rel=0.3)
    assert sorted(one.output for one in trace_of(seen)) == sorted(one.output for one in load)


def test_too_little_traffic_and_answers_that_cannot_be_read_are_refused() -> None:
    seen = server(made_profile(), [TraceRequest(0.0, 5, 3)])
    with pytest.raises(BadConfig, match="send it some load"):
        diagnose(seen)
    with pytest.raises(BadConfig, match="send it some load"):
        profile_of(seen, "x")
    with pytest.raises(BadConfig, match="no engine"):
        read_seen({"engines": []}, "http://x")
    with pytest.raises(BadConfig, match="another version"):
        read_seen({"engines": [{"passes": {}, "requests": {}}]}, "http://x")
