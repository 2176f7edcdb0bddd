"""Copies of KV blocks between device and host memory, beside the passes.

Owns a thread that performs one BlockCopy after the other, and reports which are done and how long they took. The
scheduler sees to it that no pass writes to a copy's sources or uses its targets before the copy is done. A copy to the
device begins after the passes that were submitted before it. Knows no requests and no plans.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any

import torch

from shoal.core.plan import BlockCopy
from shoal.runner.kvstore import KVStore


class Copier:
    """One thread; on a GPU also a stream of its own. Any thread may submit copies; one takes what came of them."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-copier")
        self._under_way: dict[int, Future[float]] = {}
        self._lock = Lock()  # of what is under way
        self._stream: Any = None

    def submit(self, order: BlockCopy) -> None:
        """Queue a copy; one to the device where passes are submitted to it, in their order."""
        after: Any = None
        if self._store.data.is_cuda and order.direction == "in":
            after = torch.cuda.Event()  # type: ignore[no-untyped-call]
            after.record()
        with self._lock:
            self._under_way[order.id] = self._worker.submit(self._copy, order, after)

    def _copy(self, order: BlockCopy, after: Any) -> float:
        if not self._store.data.is_cuda:
            return self._timed(order)
        with torch.cuda.device(self._store.data.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                if after is not None:
                    after.synchronize()  # by the host, so that waiting for passes is not counted as copying
                return self._timed(order)

    def _timed(self, order: BlockCopy) -> float:
        begun_s = time.perf_counter()
        self._store.copy(order)
        if self._stream is not None:
            self._stream.synchronize()
        return time.perf_counter() - begun_s

    def take(self, all_of_them: bool = False) -> tuple[tuple[tuple[int, float], ...], tuple[int, ...]]:
        """((id, seconds) of completed copies, ids of failed ones) since the last call; all_of_them waits for all.

        Copies complete in the order of their submission and are reported in it: the scan stops at the first that is
        not done, since a later one could complete during the scan and overtake it.
        """
        if not self._under_way:
            return (), ()
        with self._lock:
            under_way = list(self._under_way.items())
        if all_of_them:
            wait([copy for _, copy in under_way])
        done: list[tuple[int, float]] = []
        failed: list[int] = []
        for number, copy in under_way:
            if not copy.done():
                break
            with self._lock:
                del self._under_way[number]
            if copy.exception() is None:
                done.append((number, copy.result()))
            else:
                failed.append(number)
        return tuple(done), tuple(failed)

    def close(self) -> None:
        self._store.close()
        self._worker.shutdown(wait=True, cancel_futures=True)
