"""An Executor that computes on a thread of its own, so that the next pass is planned meanwhile.

torch releases the GIL while it computes, so planning and computing do overlap. Passes run in the order they were
submitted. Knows nothing of what a pass is.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.runner.runner import ForwardState, Runner


class ThreadedExecutor:
    """One worker thread around one runner. It calls `on_start` when it starts and `before_pass` before each pass.

    `worker`: the thread, if there is one already; `shared`: it is another executor's, which closes it.
    """

    def __init__(
        self,
        runner: Runner,
        on_start: Callable[[], None] = lambda: None,
        before_pass: Callable[[], None] = lambda: None,
        worker: ThreadPoolExecutor | None = None,
        shared: bool = False,
    ) -> None:
        self.runner = runner
        self._before_pass = before_pass
        self._shared = shared
        self._worker = worker or ThreadPoolExecutor(1, thread_name_prefix="shoal-runner", initializer=on_start)
        self._forwards: deque[tuple[StepPlan, Future[tuple[float, ForwardState | None]]]] = deque()
        self._results: deque[Future[StepResult]] = deque()

    def forward(self, plan: StepPlan) -> None:
        early = [order for order in plan.copies if order.direction == "out"]  # they need not wait for passes
        if early:
            for order in early:
                self.runner.copier.submit(order)
            plan = plan._replace(copies=tuple(order for order in plan.copies if order.direction != "out"))
        self._forwards.append((plan, self._worker.submit(self._forward, plan)))

    def _forward(self, plan: StepPlan) -> tuple[float, ForwardState | None]:
        self._before_pass()
        begun_s = time.perf_counter()
        state = self.runner.forward(plan)
        return time.perf_counter() - begun_s, state

    def sample(self, masks: LateMasks | None) -> None:
        plan, forward = self._forwards.popleft()
        self._results.append(self._worker.submit(self._sample, plan, forward, masks))

    def _sample(
        self, plan: StepPlan, forward: "Future[tuple[float, ForwardState | None]]", masks: LateMasks | None
    ) -> StepResult:
        forward_s, state = forward.result()  # done on this same thread; raises what the forward raised
        begun_s = time.perf_counter()  # not since the forward: in between, the pass may have waited for masks
        result = self.runner.sample(plan, state, masks)
        return result._replace(busy_s=forward_s + time.perf_counter() - begun_s)

    def result(self) -> StepResult:
        self._results[0].exception()  # waits; interrupted here, the result is still the next one
        return self._results.popleft().result()

    def close(self) -> None:
        if not self._shared:
            self._worker.shutdown(wait=True, cancel_futures=True)
        self.runner.copier.close()
