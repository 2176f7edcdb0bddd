"""Which tensors of a checkpoint make up which parameter of a model.

Owns the layout as data: fused parameters, their parts in order, and where each part goes. Knows shapes, no torch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

Part = tuple[str, tuple[int, ...]]
"""(a checkpoint tensor's name, its shape)"""
Fused = tuple[str, list[Part]]
"""(a parameter's name, the tensors stacked in it)"""


@dataclass(frozen=True)
class Cut:
    """Rows (axis 0) or columns (axis 1) [first, first + count) of a checkpoint's tensor; room: how many the parameter
    has for them, zeros behind them."""

    axis: int
    first: int
    count: int
    room: int

    @property
    def index(self) -> tuple[slice, ...]:
        """Of the tensor's values."""
        return (slice(None),) * self.axis + (slice(self.first, self.first + self.count),)

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What a tensor of this shape takes in the parameter."""
        return (*shape[: self.axis], self.room, *shape[self.axis + 1 :])


CutOf = Callable[[str, tuple[int, ...]], Cut]
"""What is held of a checkpoint's tensor, by its name and shape."""


def all_of(name: str, shape: tuple[int, ...]) -> Cut:
    return Cut(0, 0, shape[0], shape[0])


@dataclass(frozen=True)
class Place:
    """Rows [first, first + rows) of a fused parameter; shape is the checkpoint tensor's, of which the cut is held."""

    parameter: str
    first: int
    shape: tuple[int, ...]
    cut: Cut

    @property
    def rows(self) -> int:
        return self.cut.local(self.shape)[0]


def linear(ours: str, parts: Iterable[tuple[str, int]], inputs: int, bias: bool) -> Iterator[Fused]:
    """A projection whose outputs are those of several projections; parts: (a projection's name, its outputs)."""
    parts = list(parts)
    yield f"{ours}.weight", [(f"{theirs}.weight", (outputs, inputs)) for theirs, outputs in parts]
    if bias:
        yield f"{ours}.bias", [(f"{theirs}.bias", (outputs,)) for theirs, outputs in parts]


def norm(ours: str, theirs: str, size: int) -> Iterator[Fused]:
    yield f"{ours}.weight", [(f"{theirs}.weight", (size,))]


def shapes(layout: Iterable[Fused], cut: CutOf = all_of) -> list[tuple[str, tuple[int, ...]]]:
    """Every parameter and its shape."""
    found = []
    for name, parts in layout:
        held = [cut(source, shape).local(shape) for source, shape in parts]
        found.append((name, (sum(shape[0] for shape in held), *held[0][1:])))
    return found


def places(layout: Iterable[Fused], cut: CutOf = all_of) -> dict[str, Place]:
    """Checkpoint tensor → the rows of the parameter that it fills."""
    found = {}
    for parameter, parts in layout:
        first = 0
        for source, shape in parts:
            found[source] = Place(parameter, first, shape, cut(source, shape))
            first += found[source].rows
    return found
