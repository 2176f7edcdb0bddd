"""Checkpoints in fp8 and in 4 bits, in their real layouts, against what their numbers mean."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import BadWeights, UnsupportedModel
from shoal.kernels.fp8 import FP8
from shoal.kernels.ref import RefOps
from shoal.kernels.weights import DenseWeight, Fp8Weight
from shoal.models import model_class
from shoal.models.formats import CheckpointFormat, checkpoint_format
from shoal.models.layout import places
from shoal.models.shard import SplitShard
from shoal.runner.loader import SafetensorsReader, WeightReader, load_weights
from shoal.runner.quantized import NOT_IN_FP8, AsFp8, opened
from tests.runner.checkpoints import SPEC, is_matrix, numbers, packed

SCHEMES: dict[str, dict[str, Any]] = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        },
        "ignore": ["lm_head"],
    },
    "block": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}  # fmt: skip


def in_fp8(scheme: str, folder: Path) -> dict[str, Tensor]:
    """Saves such a checkpoint; returns the numbers that it means."""
    tensors, meant = {}, {}
    for name, tensor in numbers().items():
        stem = name.removesuffix(".weight")
        if not is_matrix(name):
            tensors[name] = meant[name] = tensor.to(torch.bfloat16)
            continue
        outputs, inputs = tensor.shape
        if scheme == "block":
            tiles = torch.nn.functional.pad(tensor, (0, -inputs % 128, 0, -outputs % 128)).unfold(0, 128, 128)
            scales = tiles.unfold(1, 128, 128).abs().amax((2, 3)) / 448
            spread = scales.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
            tensors[f"{stem}.weight_scale_inv"] = scales
        elif scheme == "channel":
            scales = spread = tensor.abs().amax(1, keepdim=True) / 448
            tensors[f"{stem}.weight_scale"] = scales.to(torch.bfloat16)
            scales = spread = scales.to(torch.bfloat16).float()
        else:
            scales = spread = tensor.abs().max() / 440
            tensors[f"{stem}.weight_scale"], tensors[f"{stem}.input_scale"] = scales, torch.tensor(0.5)
        tensors[name] = (tensor / spread).to(FP8)
        meant[name] = tensors[name].float() * spread
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return meant


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fp8_as_numbers(scheme: str, tmp_path: Path) -> None:
    meant = in_fp8(scheme, tmp_path)
    form = checkpoint_format({"quantization_config": SCHEMES[scheme]})
    params = load_weights(opened(SafetensorsReader(tmp_path), form), SPEC, torch.float32, "cpu")
    for name, place in places(model_class(SPEC).layout(SPEC)).items():
        whole = params.weights.get(place.parameter)
        found = params.vectors[place.parameter] if whole is None else whole.dense()
        assert torch.equal(found[place.first : place.first + place.rows], meant[name].float()), name


def check_ranks(reader: WeightReader, meant: dict[str, Tensor]) -> None:
    """Each of two ranks has its part of the same numbers."""
    group: Any = None  # nothing is computed
    for shard in (SplitShard(0, 2, group), SplitShard(1, 2, group)):
        params = load_weights(reader, SPEC, torch.float32, "cpu", shard=shard)
        for name, place in places(model_class(SPEC).layout(SPEC), partial(shard.cut, SPEC)).items():
            whole = params.weights.get(place.parameter)
            found = params.vectors[place.parameter] if whole is None else whole.dense()
            part = meant[name].float()[place.cut.index]
            assert torch.equal(found[place.first : place.first + place.rows], part), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fp8_as_numbers_over_ranks(scheme: str, tmp_path: Path) -> None:
    meant = in_fp8(scheme, tmp_path)
    form = checkpoint_format({"quantization_config": SCHEMES[scheme]})
    check_ranks(opened(SafetensorsReader(tmp_path), form), meant)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fp8_kept_in_fp8(scheme: str, tmp_path: Path) -> None:
    """Byte for byte where an output has one scale; products are those of the numbers, with inputs rounded."""
    meant = in_fp8(scheme, tmp_path)
    reader = opened(SafetensorsReader(tmp_path), checkpoint_format({"quantization_config": SCHEMES[scheme]}))
    params = load_weights(reader, SPEC, torch.bfloat16, "cpu", keep=AsFp8(reader, "cpu"))
    x = torch.randn(3, 256).to(FP8).float() / 64  # as it would be rounded
    x[:, 0] = 7.0
    for name, place in places(model_class(SPEC).layout(SPEC)).items():
        if place.parameter in NOT_IN_FP8:
            assert isinstance(params.weights[place.parameter], DenseWeight)
        if not is_matrix(name):
            continue
        weight = params.weights[place.parameter]
        assert isinstance(weight, Fp8Weight)
        rows = slice(place.first, place.first + place.rows)
        difference = (weight.dense()[rows] - meant[name]).norm() / meant[name].norm()
        assert difference < (0.04 if scheme == "block" else 1e-7)  # two scales in an output: rounded once more
        if weight.shape[1] == 256 and scheme != "block":
            found = RefOps().linear(x, weight, None)[:, rows]
            torch.testing.assert_close(found, x @ meant[name].t(), rtol=1e-4, atol=1e-4)


def test_plain_numbers_are_rounded_part_by_part(tmp_path: Path) -> None:
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in numbers().items()}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    params = load_weights(reader, SPEC, torch.bfloat16, "cpu", keep=AsFp8(reader, "cpu"))
    whole = load_weights(reader, SPEC, torch.bfloat16, "cpu")
    from shoal.kernels.weights import quantize_fp8

    for name, weight in params.weights.items():
        assert isinstance(weight, Fp8Weight) == (name not in NOT_IN_FP8)
        if isinstance(weight, Fp8Weight):
            assert torch.equal(weight.dense(), quantize_fp8(whole.weights[name].dense()).dense())


def test_what_is_missing_or_does_not_fit_is_refused(tmp_path: Path) -> None:
    in_fp8("channel", tmp_path)
    reader = SafetensorsReader(tmp_path)
    tensors = {name: reader.read(name) for name in reader.names()}
    scale = "model.layers.0.mlp.down_proj.weight_scale"
    for change, message in (({}, "weight_scale is missing"), ({scale: torch.ones(5, 3)}, "does not fit")):
        folder = tmp_path / message.replace(" ", "-")
        folder.mkdir()
        save_file(
            {**{name: tensor for name, tensor in tensors.items() if name != scale}, **change},
            folder / "model.safetensors",
        )
        with pytest.raises(BadWeights, match=message):
            load_weights(opened(SafetensorsReader(folder), CheckpointFormat("fp8")), SPEC, torch.float32, "cpu")


# ---- 4 bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "group", "shuffled"),
    [("awq", 128, False), ("gptq", 64, False), ("gptq", -1, False), ("gptq", 128, True)],
)
def test_four_bits_as_numbers(kind: str, group: int, shuffled: bool, tmp_path: Path) -> None:
    meant = packed(kind, group, tmp_path, shuffled)
    given = {"quant_method": kind, "bits": 4, "group_size": group, "desc_act": shuffled, "version": "gemm"}
    reader = opened(SafetensorsReader(tmp_path), checkpoint_format({"quantization_config": given}))
    params = load_weights(reader, SPEC, torch.float32, "cpu")
    for name, place in places(model_class(SPEC).layout(SPEC)).items():
        whole = params.weights.get(place.parameter)
        found = params.vectors[place.parameter] if whole is None else whole.dense()
        assert torch.equal(found[place.first : place.first + place.rows], meant[name].float()), name


def test_four_bits_over_ranks(tmp_path: Path) -> None:
    meant = packed("gptq", 128, tmp_path, True)
    form = checkpoint_format({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}})
    check_ranks(opened(SafetensorsReader(tmp_path), form), meant)


def test_words_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    packed("awq", 128, tmp_path)
    for group in (64, 32):
        with pytest.raises(BadWeights, match="are needed"):
            load_weights(
                opened(SafetensorsReader(tmp_path), CheckpointFormat("awq", group=group)), SPEC, torch.float32, "cpu"
            )


# ---- config.json ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, None),
        (SCHEMES["tensor"], CheckpointFormat("fp8")),
        (SCHEMES["channel"], CheckpointFormat("fp8")),
        (SCHEMES["block"], CheckpointFormat("fp8", (128, 128))),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, CheckpointFormat("fp8")),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, CheckpointFormat("awq", group=128)),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, CheckpointFormat("gptq", zeros_from=1)),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
            CheckpointFormat("gptq", group=32),
        ),
    ],
)  # fmt: skip
def test_formats(given: Any, wanted: CheckpointFormat | None) -> None:
    assert checkpoint_format({"quantization_config": given}) == wanted


@pytest.mark.parametrize(
    "given",
    [
        "fp8", {"quant_method": "bitsandbytes"}, {"quant_method": "gptq", "bits": 8}, {"quant_method": "gptq"},
        {"quant_method": "awq", "bits": 4, "version": "gemv"}, {"quant_method": "awq", "bits": 4, "group_size": 0},
        {"quant_method": "fp8", "weight_block_size": [128]}, {"quant_method": "fp8", "weight_block_size": "axb"},
        {"quant_method": "compressed-tensors"}, {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float", "strategy": "group"}}},
        },
    ],
    ids=json.dumps,
)  # fmt: skip
def test_other_formats_are_refused(given: Any) -> None:
    with pytest.raises(UnsupportedModel, match="is not supported; use the unquantized"):
        checkpoint_format({"quantization_config": given})
