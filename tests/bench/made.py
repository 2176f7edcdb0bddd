"""RunRecords made by a toy model of each batching system, so that tables and plots can be tested without an engine.

A pass costs a fixed time and a time per position computed, padding included. Every run is a function of its seed.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from shoal.bench.record import PassRecord, RequestRecord, RunRecord

PASS_S, POSITION_S = 0.020, 0.0006
KV_TOTAL = 8192

# name → batching, layout, prefill, memory
PRESETS = {
    "transformers": ("static", "padded", "inline", "reserve"),
    "fastertransformer": ("static", "shrink", "inline", "reserve"),
    "classic-dynamic": ("dynamic", "padded", "inline", "reserve"),
    "orca": ("continuous", "ragged", "inline", "reserve"),
    "tgi": ("continuous", "padded", "exclusive", "reserve"),
    "vllm": ("continuous", "ragged", "exclusive", "ondemand"),
    "sglang": ("continuous", "ragged", "exclusive", "predict"),
    "trtllm-no-evict": ("continuous", "ragged", "inline", "reserve"),
    "trtllm-max-utilization": ("continuous", "ragged", "inline", "ondemand"),
    "lmdeploy": ("continuous", "shrink", "inline", "ondemand"),
    "sarathi": ("continuous", "ragged", "chunked", "reserve"),
    "shoal": ("continuous", "ragged", "chunked", "ondemand"),
}


@dataclass
class Toy:
    """Plays one preset over the requests."""

    requests: list[RequestRecord]
    batching: str
    layout: str
    prefill: str
    memory: str
    slots: int = 8
    chunk: int = 48
    now_s: float = 0.0
    running: list[int] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    computed: dict[int, int] = field(default_factory=dict)

    def play(self) -> None:
        queue = sorted(range(len(self.requests)), key=lambda number: self.requests[number].arrived_s)
        while queue or self.running:
            queue = self.join(queue)
            if not self.running:
                self.now_s = max(self.now_s, self.requests[queue[0]].arrived_s)
                self.dead = []
                continue
            self.one_pass(sum(self.requests[number].arrived_s <= self.now_s for number in queue))

    def join(self, queue: list[int]) -> list[int]:
        here = [number for number in queue if self.requests[number].arrived_s <= self.now_s]
        if self.batching != "continuous" and self.running:
            return queue
        joining = here[: self.slots - len(self.running)]
        self.running += joining
        self.dead = self.dead[len(joining) :]
        for number in joining:
            self.computed[number] = 0
            self.requests[number].started_s = self.now_s
        return [number for number in queue if number not in joining]

    def rows(self) -> list[tuple[int, int, int]]:
        wanted = []
        for number in self.running:
            at = self.computed[number]
            left = max(self.requests[number].prompt - at, 0)
            wanted.append((number, at, min(left, self.chunk) if left and self.prefill == "chunked" else left or 1))
        prompts = [row for row in wanted if row[1] < self.requests[row[0]].prompt]
        return prompts if self.prefill == "exclusive" and prompts else wanted

    def one_pass(self, waiting: int) -> None:
        rows = self.rows()
        useful = sum(count for _, _, count in rows)
        width = 0 if self.layout == "ragged" else max(count for _, _, count in rows)
        dead = len(self.dead) if self.layout == "padded" else 0
        padded = width * (len(rows) + dead) - useful if width else 0
        planned_s = self.now_s
        self.now_s += PASS_S + POSITION_S * (useful + padded)
        used = sum(self.computed.values())
        held = sum(self.reserved(number) for number in self.running + self.dead)
        times = (max(planned_s - 0.01, 0.0), self.now_s)
        state = (waiting, len(self.running), max(held, used), used, KV_TOTAL)
        self.passes.append(PassRecord(*times, tuple(rows), useful, padded, 0, dead, 512, *state))
        for number, _, count in rows:
            self.computed[number] += count
            self.speak(number)
        if not self.running:
            self.let_go()

    def reserved(self, number: int) -> int:
        if self.memory == "reserve":
            return self.requests[number].prompt + 256
        return self.computed.get(number, 0) + 16

    def speak(self, number: int) -> None:
        request = self.requests[number]
        if self.computed[number] < request.prompt:
            return
        request.token_s.append(self.now_s)
        if len(request.token_s) == request.output:
            request.ended_s, request.reason = self.now_s, "length"
            self.running.remove(number)
            self.dead.append(number)
            if self.batching == "continuous":
                del self.computed[number]

    def let_go(self) -> None:
        """The group has ended: its clients receive everything now."""
        if self.batching == "continuous":
            return
        for number in self.computed:
            request = self.requests[number]
            request.token_s, request.ended_s = [self.now_s] * request.output, self.now_s
        self.computed, self.dead = {}, []


def made_requests(count: int, rate: float, seed: int = 0) -> list[RequestRecord]:
    dice = random.Random(seed)
    now_s, made = 0.0, []
    for _ in range(count):
        now_s += dice.expovariate(rate) if rate else 0.0
        made.append(RequestRecord(now_s, dice.choice((8, 24, 60, 200)), min(int(dice.expovariate(1 / 30)) + 4, 150)))
    return made


def made_run(preset: str, rate: float, count: int = 48, requests: list[RequestRecord] | None = None) -> RunRecord:
    """One preset at one rate. A name that is not in PRESETS behaves like shoal."""
    axes = PRESETS.get(preset, PRESETS["shoal"])
    toy = Toy(made_requests(count, rate) if requests is None else requests, *axes)
    toy.play()
    settings: dict[str, Any] = dict(zip(("batching", "layout", "prefill", "memory"), axes, strict=True))
    label = f"{preset}(8)" if axes[0] == "static" else preset
    busy_s = sum(one.committed_s - one.planned_s for one in toy.passes) * 0.9
    return RunRecord(preset, label, rate, settings, toy.slots, toy.requests, toy.passes, toy.now_s, busy_s)


def empty_run(preset: str, rate: float) -> RunRecord:
    """It failed before its first pass."""
    return RunRecord(preset, preset, rate, {}, 8, [], [], 0.0, 0.0)


def failed_run(preset: str, rate: float) -> RunRecord:
    """Requests arrived, none was served."""
    requests = made_requests(6, rate)
    for request in requests:
        request.reason, request.ended_s = "error", request.arrived_s
    return RunRecord(preset, preset, rate, {}, 8, requests, [], 1.0, 0.0)


def giant_run(prefill: str, streams: int = 16) -> RunRecord:
    """A prompt of 2,000 tokens arrives while `streams` others decode."""
    requests = [RequestRecord(0.0, 16, 120) for _ in range(streams)] + [RequestRecord(1.5, 2000, 20)]
    toy = Toy(requests, "continuous", "ragged", prefill, "ondemand", slots=streams + 1)
    toy.play()
    return RunRecord(prefill, prefill, 0.0, {"prefill": prefill}, streams + 1, requests, toy.passes, toy.now_s, 1.0)
