"""A projection of a layer.

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
