"""Attention kinds. Today one: grouped-query attention over the whole past or a window.

A kind owns its parameters, how a checkpoint's tensors are fused into them, and the order of its operations up to the
output projection; layer.py adds norm, projection and residual. Does not know families, files or devices.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from shoal.kernels import Batch, Ops
from shoal.kernels.weights import Parameters
from shoal.models import layout
from shoal.models.layout import Fused
from shoal.models.linear import Linear
from shoal.models.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class GroupedQueryAttention:
    """Queries, keys and values in one projection; several query heads share a KV head."""

    norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    """Weight of the norm of each head's queries, with k_norm; None: they are not normed."""
    k_norm: Tensor | None
    out: Linear
    eps: float
    scale: float
    window: int
    """0: the whole past."""
    kind: str = "gqa"

    @classmethod
    def of(cls, spec: AttentionSpec, eps: float, name: str, params: Parameters) -> "GroupedQueryAttention":
        """The attention whose parameters begin with `name`."""
        return cls(
            norm=params.vectors[f"{name}.attention_norm.weight"],
            qkv=Linear.of(params, f"{name}.qkv"),
            q_norm=params.vectors.get(f"{name}.q_norm.weight"),
            k_norm=params.vectors.get(f"{name}.k_norm.weight"),
            out=Linear.of(params, f"{name}.out"),
            eps=eps,
            scale=spec.head_dim**-0.5,
            window=spec.window,
        )

    @staticmethod
    def layout(spec: AttentionSpec, hidden: int, ours: str, theirs: str) -> Iterator[Fused]:
        """As Llama's checkpoints name them."""
        block = f"{theirs}.self_attn"
        qkv = [(f"{block}.q_proj", spec.q_size), (f"{block}.k_proj", spec.kv_size), (f"{block}.v_proj", spec.kv_size)]
        yield from layout.linear(f"{ours}.qkv", qkv, hidden, spec.qkv_bias)
        yield from layout.linear(f"{ours}.out", [(f"{block}.o_proj", hidden)], spec.q_size, spec.out_bias)
        yield from layout.norm(f"{ours}.attention_norm", f"{theirs}.input_layernorm", hidden)
        if spec.qk_norm:
            yield from layout.norm(f"{ours}.q_norm", f"{block}.q_norm", spec.head_dim)
            yield from layout.norm(f"{ours}.k_norm", f"{block}.k_norm", spec.head_dim)

    def inner(
        self, ops: Ops, x: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Normed x [T, hidden] → [T, heads × head_dim], before the output projection. Writes into the cache."""
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm, self.eps)
        q = ops.rotate_and_store(self.qkv(ops, x), norms, rope, cache, batch.slots)
        return ops.attention(q, *cache, batch, self.scale, self.window).flatten(1)


ATTENTIONS = {"gqa": GroupedQueryAttention}
