"""Models: families of decoder models, each described by a ModelSpec and computed by a class.

Owns the making of a model. Does not know files, devices, scheduling or block ids.
Importing this package does not load torch, so that a spec can be read without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from shoal.errors import UnsupportedModel
from shoal.models.spec import MODELS, ModelSpec, RopeSpec, spec_from_config

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from shoal.kernels import Batch, Ops
    from shoal.kernels.weights import Parameters
    from shoal.models.layout import Fused
    from shoal.models.shard import Shard

__all__ = ["MODELS", "Model", "ModelSpec", "RopeSpec", "make_model", "model_class", "spec_from_config"]


class Model(Protocol):
    """What the runner needs of every family."""

    spec: ModelSpec
    ops: Ops
    dtype: dtype
    """Type of the residual stream."""

    shard: Shard

    def __init__(self, spec: ModelSpec, params: Parameters, ops: Ops, shard: Shard) -> None: ...

    @staticmethod
    def layout(spec: ModelSpec) -> Iterable[Fused]:
        """Every parameter, and the Hugging Face tensors that are stacked in it."""

    def shortened(self, layers: int) -> Model:
        """A model of the first layers only, with the same final norm and head; the weights are the same objects."""

    def twin(self) -> Model:
        """The same weights, for passes on another thread."""

    def reserve_positions(self, count: int) -> None:
        """Make the rope tables hold positions 0..count-1, so that no later pass of that length grows them."""

    def forward(self, ids: Tensor, batch: Batch, kv: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """ids [T] → hidden [T, hidden], before the final norm."""

    def scores(self, hidden_rows: Tensor) -> Tensor:
        """Rows of forward's result → [rows, vocab] in the model's own type; whole on rank 0 only."""

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """The same in float32."""


def model_class(spec: ModelSpec) -> type[Model]:
    """The class that computes this family."""
    if spec.family not in MODELS:
        raise UnsupportedModel(f"family {spec.family!r} is not supported; known: {', '.join(MODELS)}")
    module, _, name = MODELS[spec.family].partition(":")
    found: type[Model] = getattr(import_module(module), name)
    return found


def make_model(spec: ModelSpec, params: Parameters, ops: Ops, shard: Shard | None = None) -> Model:
    """The model over these parameters, computing with these kernels; with a shard, the part of the model that it names,
    whose spec is that part's."""
    from shoal.models.shard import WHOLE  # loads torch

    return model_class(spec)(spec, params, ops, shard or WHOLE)
