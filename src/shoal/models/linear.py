"""A projection of a layer, and the one way in which its output joins the residual stream.

Knows ops and parameters by name. Does not know families or what is projected.
"""

from dataclasses import dataclass

from torch import Tensor

from shoal.kernels import Ops
from shoal.kernels.weights import Parameters, Weight


@dataclass(frozen=True, eq=False)
class Linear:
    """x Wᵀ + b."""

    weight: Weight
    bias: Tensor | None

    @classmethod
    def of(cls, params: Parameters, name: str) -> "Linear":
        return cls(params.weights[f"{name}.weight"], params.vectors.get(f"{name}.bias"))

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


def add_output(ops: Ops, output: Linear, x: Tensor, residual: Tensor) -> Tensor:
    """The residual stream after an attention or MLP whose last projection is `output`; the one given is used up.

    Every addition to the residual stream happens here. Where a projection's inputs are split over several devices, each
    computes a part of the sum: this is the place to add up the parts before the residual, which each device has whole.
    """
    return ops.linear_add(x, output.weight, output.bias, residual)
