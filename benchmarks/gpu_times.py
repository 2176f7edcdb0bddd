"""How long kernels take on a GPU, for the benchmarks of products."""

from collections.abc import Callable, Sequence

import torch


def microseconds(works: Sequence[Callable[[], object]], replays: int = 5) -> float:
    """Mean time of one of the works, all of them in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # where the inputs are being made
    with torch.cuda.stream(stream):
        works[0]()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for work in works:
                work()
        graph.replay()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(replays):
            graph.replay()
        ended.record()
        ended.synchronize()
    return 1000 * begun.elapsed_time(ended) / (replays * len(works))
