"""MLP kinds. Today one: dense and gated (SwiGLU).

A kind owns its parameters, how a checkpoint's tensors are fused into them, and the order of its operations up to the
output projection; layer.py adds norm, projection and residual. Does not know families, files or devices.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from shoal.kernels import Ops
from shoal.kernels.weights import Parameters
from shoal.models import layout
from shoal.models.layout import Fused
from shoal.models.linear import Linear
from shoal.models.spec import MlpSpec


@dataclass(frozen=True, eq=False)
class GatedMlp:
    """silu(gate) × up, with gate and up in one projection; then down."""

    norm: Tensor
    gate_up: Linear
    out: Linear
    kind: str = "gated"

    @classmethod
    def of(cls, spec: MlpSpec, name: str, params: Parameters) -> "GatedMlp":
        """The MLP whose parameters begin with `name`."""
        norm = params.vectors[f"{name}.mlp_norm.weight"]
        return cls(norm, Linear.of(params, f"{name}.gate_up"), Linear.of(params, f"{name}.down"))

    @staticmethod
    def layout(spec: MlpSpec, hidden: int, ours: str, theirs: str) -> Iterator[Fused]:
        """As Llama's checkpoints name them."""
        gate_up = [(f"{theirs}.mlp.gate_proj", spec.inner_size), (f"{theirs}.mlp.up_proj", spec.inner_size)]
        yield from layout.linear(f"{ours}.gate_up", gate_up, hidden, spec.bias)
        yield from layout.linear(f"{ours}.down", [(f"{theirs}.mlp.down_proj", hidden)], spec.inner_size, spec.bias)
        yield from layout.norm(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", hidden)

    def inner(self, ops: Ops, x: Tensor) -> Tensor:
        """Normed x [T, hidden] → [T, inner], before the output projection."""
        return ops.silu_mul(self.gate_up(ops, x))


MLPS = {"gated": GatedMlp}
