"""What the scheduler itself costs: plan and commit of passes of decodes, on one core, without a device.

Takes schedulers and answers their plans with made-up tokens, which is not counted. Knows no policies.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.params import SamplingParams
from shoal.core.plan import StepPlan, StepResult
from shoal.core.request import Request
from shoal.errors import EngineError
from shoal.sched.scheduler import Scheduler

PROMPT = 16  # tokens of each prompt
FIXED_US = 50.0  # of a pass, however many requests run
AIM_US, MOST_US = 1.0, 4.0  # per running request beyond that


@dataclass(frozen=True)
class Cost:
    """One policy with so many running requests."""

    policy: str
    running: int
    plan_us: float
    commit_us: float

    @property
    def total_us(self) -> float:
        return self.plan_us + self.commit_us

    @property
    def each_us(self) -> float:
        """Per running request, beyond the fixed part of a pass."""
        return max(0.0, self.total_us - FIXED_US) / self.running


def answer(plan: StepPlan) -> StepResult:
    """A device's result, at once: tokens without a pattern, of which no drafter knows the next; no draft is right."""
    drawing = plan.draws > 0
    rows, starts = plan.rows[drawing], plan.starts[drawing]
    tokens = (rows * 7919 + (starts + 1) * 104_729) % 31_337
    done = tuple((order.id, 1e-3) for order in plan.copies)
    ones = np.ones_like(rows)
    return StepResult(plan.step, rows, plan.generations[drawing], ones, tokens, copies_done=done, busy_s=0.01)


def fill(scheduler: Scheduler, running: int, passes: int, tiers: Sequence[str]) -> None:
    """Let so many requests in, and compute until all of them decode."""
    for number in range(running):
        prompt = [(number * 31 + position) % scheduler.limits.vocab_size for position in range(PROMPT)]
        params = SamplingParams(temperature=0.0, max_tokens=passes + 64, ignore_eos=True)
        tier = tiers[number % len(tiers)]
        scheduler.submit(Request(str(number), prompt, params, seed=number, tenant=f"t{number % 8}", tier=tier), 0.0)
    for _ in range(4 + 2 * running):
        plan = scheduler.plan(0.0)
        if plan is None:
            raise EngineError("the benchmark's requests do not fit; raise --kv-memory")
        scheduler.commit(answer(plan), 0.0)
        if len(plan.rows) == running and plan.counts.max() == 1:
            return
    raise EngineError(f"{running} requests never decoded together; raise --max-num-batched-tokens")


def measure(make: Callable[[int], Scheduler], policy: str, running: int, passes: int, tiers: Sequence[str]) -> Cost:
    """The median of some passes, with garbage collection held off as the engine does between passes."""
    scheduler = make(running)
    fill(scheduler, running, passes, tiers)
    plans, commits = [], []
    gc.collect()
    gc.disable()
    try:
        for number in range(passes):
            now_s = 0.01 * number
            begun = time.perf_counter()
            plan = scheduler.plan(now_s)
            planned = time.perf_counter()
            assert plan is not None
            assert len(plan.rows) == running, "a request did not decode"
            result = answer(plan)
            again = time.perf_counter()
            scheduler.commit(result, now_s)
            commits.append(time.perf_counter() - again)
            plans.append(planned - begun)
    finally:
        gc.enable()
    return Cost(policy, running, 1e6 * statistics.median(plans), 1e6 * statistics.median(commits))


def table(costs: Sequence[Cost]) -> str:
    """Microseconds per pass, and per running request beyond the fixed part."""
    sizes = sorted({one.running for one in costs})
    width = max(len(one.policy) for one in costs)
    lines = [f"{'policy':{width}}  " + "  ".join(f"{size:>7} µs  each" for size in sizes)]
    for policy in dict.fromkeys(one.policy for one in costs):
        mine = {one.running: one for one in costs if one.policy == policy}
        cells = [f"{mine[size].total_us:>10,.0f}  {mine[size].each_us:>4.2f}" for size in sizes]
        lines.append(f"{policy:{width}}  " + "  ".join(cells))
    worst = max(costs, key=lambda one: one.each_us)
    lines.append(
        f"each: µs per running request beyond {FIXED_US:.0f} µs a pass; at most {MOST_US:g}, aim {AIM_US:g}; "
        f"worst here {worst.each_us:.2f} ({worst.policy}, {worst.running} running)"
    )
    return "\n".join(lines)
