"""Which tensors of a checkpoint make up which parameter of a model.

Owns the layout as data: fused parameters, their parts in order, and where each part goes. Knows shapes, no torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Part = tuple[str, tuple[int, ...]]
"""(a checkpoint tensor's name, its shape)"""
Fused = tuple[str, list[Part]]
"""(a parameter's name, the tensors stacked in it)"""


@dataclass(frozen=True)
class Place:
    """Rows [first, first + rows) of a fused parameter; shape is the checkpoint tensor's."""

    parameter: str
    first: int
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[0]


def linear(ours: str, parts: Iterable[tuple[str, int]], inputs: int, bias: bool) -> Iterator[Fused]:
    """A projection whose outputs are those of several projections; parts: (a projection's name, its outputs)."""
    parts = list(parts)
    yield f"{ours}.weight", [(f"{theirs}.weight", (outputs, inputs)) for theirs, outputs in parts]
    if bias:
        yield f"{ours}.bias", [(f"{theirs}.bias", (outputs,)) for theirs, outputs in parts]


def norm(ours: str, theirs: str, size: int) -> Iterator[Fused]:
    yield f"{ours}.weight", [(f"{theirs}.weight", (size,))]


def shapes(layout: Iterable[Fused]) -> list[tuple[str, tuple[int, ...]]]:
    """Every parameter and its shape."""
    return [(name, (sum(shape[0] for _, shape in parts), *parts[0][1][1:])) for name, parts in layout]


def places(layout: Iterable[Fused]) -> dict[str, Place]:
    """Checkpoint tensor → the rows of the parameter that it fills."""
    found = {}
    for parameter, parts in layout:
        first = 0
        for source, shape in parts:
            found[source] = Place(parameter, first, shape)
            first += shape[0]
    return found
