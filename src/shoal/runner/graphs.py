"""CUDA graphs: recorded launches, recorded when a shape occurs for the second time, and the sizes worth recording.

All graphs share one memory pool: they run one after the other, and nothing that they leave there is read later.
Knows no model and no plan.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from typing import TypeAlias

import torch

log = logging.getLogger(__name__)

# graphs that are recorded in small steps: of each, its positions and seconds, after any number of None
Recordings: TypeAlias = Iterator[tuple[int, float] | None]

LOGGED = 16  # graphs between two lines of the log

# a graph computes its whole size, so sizes are dense where a pass is short
LINES = (*range(1, 9), *range(10, 17, 2), *range(24, 65, 8), *range(80, 257, 16), *range(288, 1025, 32))
# of several rows that verify drafts: few, because they are combined with numbers of rows
VERIFIED = (*range(8, 65, 8), *range(96, 257, 32), 384, 512, 768, 1024)
TOKENS = (*range(16, 129, 16), *range(192, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256))


def size_for(sizes: tuple[int, ...], count: int) -> int | None:
    """The smallest of the sizes that holds `count`; None: none does.

    >>> size_for((1, 2, 4, 8), 3), size_for((1, 2, 4, 8), 9)
    (4, None)
    """
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


class Graphs:
    """Recorded work by key. Call on one stream only, which is not the default one."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen: set[Hashable] = set()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, key: Hashable, work: Callable[[], object]) -> bool:
        """Do the work: the first time directly, which also compiles its kernels; from the second time on as a graph.

        Returns whether the graph was there: without it this takes many times as long as it will from now on.
        """
        graph = self._graphs.get(key)
        known = graph is not None
        if graph is None:
            if key not in self._seen:
                self._seen.add(key)
                work()
                return False
            graph = self._graphs[key] = self._record(work)
            log.debug("recorded graph %d: %s", len(self._graphs), key)
            if len(self._graphs) % LOGGED == 0:
                log.info("%d CUDA graphs recorded; each batch size is recorded when it occurs again", len(self._graphs))
        graph.replay()
        return known

    def _record(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the first error is the cause
                graph.capture_end()
            raise
        graph.capture_end()
        return graph

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self._graphs.clear()
        self._seen.clear()
