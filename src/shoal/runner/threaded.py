"""An Executor that computes on a thread of its own, so that the next pass is planned meanwhile.

torch lets go of the interpreter while it computes, so planning and computing do overlap. Passes run in the order
they were handed over. Knows nothing of what a pass is.
"""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.runner.runner import ForwardState, Runner


class ThreadedExecutor:
    """One worker thread around one runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-runner")
        self._begun: deque[tuple[StepPlan, Future[tuple[float, ForwardState | None]]]] = deque()
        self._results: deque[Future[StepResult]] = deque()

    def forward(self, plan: StepPlan) -> None:
        self._begun.append((plan, self._worker.submit(self._forward, plan)))

    def _forward(self, plan: StepPlan) -> tuple[float, ForwardState | None]:
        begun_s = time.perf_counter()
        begun = self.runner.forward(plan)
        return time.perf_counter() - begun_s, begun

    def sample(self, masks: LateMasks | None) -> None:
        plan, begun = self._begun.popleft()
        self._results.append(self._worker.submit(self._sample, plan, begun, masks))

    def _sample(
        self, plan: StepPlan, forward: "Future[tuple[float, ForwardState | None]]", masks: LateMasks | None
    ) -> StepResult:
        forward_s, begun = forward.result()  # done: this thread did it, or it raises what the forward raised
        begun_s = time.perf_counter()  # not since the forward: between the two it may have waited for masks
        result = self.runner.sample(plan, begun, masks)
        return replace(result, busy_s=forward_s + time.perf_counter() - begun_s)

    def result(self) -> StepResult:
        self._results[0].exception()  # waits; interrupted here, the result is still the next one
        return self._results.popleft().result()

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
        self.runner.copier.close()
