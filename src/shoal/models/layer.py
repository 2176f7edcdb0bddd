"""A decoder layer: attention, then an MLP, each normed before and added to the residual stream after.

Owns which kinds a layer is made of, from the model's spec, and the order of its operations. Does not know families,
files or devices.

    residual ─┬─► norm ─► attention ─► out ─► + ─┬─► norm ─► MLP ─► out ─► + ─► residual
              └───────────────────────────────┘  └───────────────────────┘
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.kernels import Batch, Ops
from shoal.kernels.weights import Parameters
from shoal.models.attention import ATTENTIONS, GroupedQueryAttention
from shoal.models.layout import Fused
from shoal.models.mlp import MLPS, GatedMlp
from shoal.models.shard import WHOLE, Shard
from shoal.models.spec import ModelSpec


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer. Devices that compute a whole stack in one call read it by these names (Ops.fused)."""

    attention: GroupedQueryAttention
    mlp: GatedMlp
    eps: float
    shard: Shard = WHOLE

    @classmethod
    def of(cls, spec: ModelSpec, number: int, name: str, params: Parameters, shard: Shard) -> "Layer":
        """The layer whose parameters begin with `name`."""
        attention, mlp = spec.attention(number), spec.mlp(number)
        return cls(
            ATTENTIONS[attention.kind].of(attention, spec.norm_eps, name, params),
            MLPS[mlp.kind].of(mlp, name, params),
            spec.norm_eps,
            shard,
        )

    @staticmethod
    def layout(spec: ModelSpec, number: int, ours: str, theirs: str) -> Iterator[Fused]:
        """Its parameters, norms last, and the checkpoint's tensors in each. Dummy weights depend on the order."""
        attention, mlp = spec.attention(number), spec.mlp(number)
        found = [
            *ATTENTIONS[attention.kind].layout(attention, spec.hidden_size, ours, theirs),
            *MLPS[mlp.kind].layout(mlp, spec.hidden_size, ours, theirs),
        ]
        yield from sorted(found, key=lambda parameter: parameter[0].endswith("norm.weight"))

    def forward(
        self, ops: Ops, residual: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """residual [T, hidden] → the same after this layer. Writes this pass's keys and values into the cache."""
        x = ops.rms_norm(residual, self.attention.norm, self.eps)
        mixed = self.attention.inner(ops, x, rope, batch, cache)
        residual = self.shard.add_output(ops, self.attention.out, mixed, residual)
        inner = self.mlp.inner(ops, ops.rms_norm(residual, self.mlp.norm, self.eps))
        return self.shard.add_output(ops, self.mlp.out, inner, residual)


def run_layers(
    ops: Ops,
    layers: Sequence[Layer],
    residual: Tensor,
    rope: tuple[Tensor, Tensor],
    batch: Batch,
    kv: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """All layers, one operation after the other."""
    for layer, cache in zip(layers, kv, strict=True):
        residual = layer.forward(ops, residual, rope, batch, cache)
    return residual
