"""Matrices kept in 4 bits: AWQ, GPTQ and GGUF files in their real layouts, against what their numbers mean."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal import kernels
from shoal.errors import BadConfig, BadWeights
from shoal.files.gguf import GgufFile
from shoal.kernels.block_weight import BlockWeight
from shoal.kernels.weights import DenseWeight, Parameters
from shoal.models import model_class, spec_from_config
from shoal.models.formats import checkpoint_format
from shoal.models.layout import places
from shoal.models.spec import ModelSpec
from shoal.runner.int4 import FROM_BLOCKS, AsInt4, int4_source, to_int4
from shoal.runner.loader import ArrayReader, SafetensorsReader, WeightReader, load_weights
from shoal.runner.quantized import opened
from tests.files.ggufs import Q, hf_weights, write
from tests.kernels.blocks import on_grid
from tests.runner.checkpoints import SPEC, numbers, packed

LAYOUTS = [
    ("awq", 128, False), ("awq", 64, False), ("gptq", 128, False), ("gptq", 64, True), ("gptq", -1, False),
    ("gptq", -1, True), ("gptq", 32, True),
]  # fmt: skip


def reader_of(folder: Path, kind: str, group: int, **more: Any) -> WeightReader:
    given = {"quant_method": kind, "bits": 4, "group_size": group, **more}
    return opened(SafetensorsReader(folder), checkpoint_format({"quantization_config": given}))


def kept(reader: WeightReader, file: GgufFile | None = None, spec: ModelSpec = SPEC) -> Parameters:
    source = int4_source(reader, file, "this model")
    return load_weights(reader, spec, torch.float32, "cpu", keep=AsInt4(source, "cpu"))


def check(params: Parameters, meant: dict[str, Tensor], spec: ModelSpec = SPEC) -> None:
    """All numbers are those that the file means, and products with them, too."""
    ops = kernels.pick("cpu")
    for name, place in places(model_class(spec).layout(spec)).items():
        whole = params.weights.get(place.parameter)
        found = params.vectors[place.parameter] if whole is None else whole.dense()
        rows = slice(place.first, place.first + place.rows)
        assert torch.equal(found[rows], meant[name].float()), name
        if isinstance(whole, BlockWeight):
            x = on_grid(3, whole.inputs)
            wanted = x.double() @ meant[name].double().T
            size = float((x.abs().double() @ meant[name].abs().double().T).max())
            product = ops.linear(x, ops.prepare(whole), None)[:, rows]
            torch.testing.assert_close(product.double(), wanted, atol=1e-5 * size, rtol=0)


@pytest.mark.parametrize(("kind", "group", "symmetric"), LAYOUTS)
def test_awq_and_gptq_files_stay_in_four_bits(kind: str, group: int, symmetric: bool, tmp_path: Path) -> None:
    meant = packed(kind, group, tmp_path, symmetric=symmetric)
    params = kept(reader_of(tmp_path, kind, group))
    check(params, meant)
    for name, weight in params.weights.items():
        assert isinstance(weight, DenseWeight if name in ("embedding.weight", "head.weight") else BlockWeight), name
        if isinstance(weight, BlockWeight):
            assert weight.bits == 4
            assert weight.scale_group == (group if group > 0 else weight.inputs)
            assert weight.nbytes < 0.8 * weight.shape[0] * weight.inputs


def test_groups_in_order_may_be_told_so(tmp_path: Path) -> None:
    """Files of GPTQ have g_idx also where no column was sorted."""
    meant = packed("gptq", 64, tmp_path)
    reader = SafetensorsReader(tmp_path)
    tensors = {name: reader.read(name) for name in reader.names()}
    for name, tensor in list(tensors.items()):
        if name.endswith(".qweight"):
            index = torch.arange(len(tensor) * 8, dtype=torch.int32) // 64
            tensors[f"{name.removesuffix('.qweight')}.g_idx"] = index
    folder = tmp_path / "told"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    params = kept(reader_of(folder, "gptq", 64))
    assert isinstance(params.weights["layers.0.qkv.weight"], BlockWeight)
    check(params, meant)


def test_sorted_columns_become_numbers(tmp_path: Path) -> None:
    """If only one matrix has them, the others are kept; if all have, there is nothing to keep."""
    packed("gptq", 64, tmp_path, shuffled=True)
    with pytest.raises(BadConfig, match=r"has none that can be kept; use AWQ or GPTQ weights with groups of 32, 64 or"):
        kept(reader_of(tmp_path, "gptq", 64))
    packed("gptq", 64, tmp_path)
    tensors = {name: SafetensorsReader(tmp_path).read(name) for name in SafetensorsReader(tmp_path).names()}
    one = "model.layers.0.mlp.down_proj"
    packed("gptq", 64, tmp_path, shuffled=True)
    reader = SafetensorsReader(tmp_path)
    tensors |= {name: reader.read(name) for name in reader.names() if name.startswith(one)}
    folder = tmp_path / "mixed"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    params = kept(reader_of(folder, "gptq", 64))
    assert isinstance(params.weights["layers.0.down.weight"], DenseWeight)
    assert isinstance(params.weights["layers.0.gate_up.weight"], BlockWeight)
    down = load_weights(reader_of(folder, "gptq", 64), SPEC, torch.float32, "cpu").weights["layers.0.down.weight"]
    assert torch.equal(params.weights["layers.0.down.weight"].dense(), down.dense())


def test_bad_words_are_refused_in_one_line(tmp_path: Path) -> None:
    packed("awq", 128, tmp_path)
    reader = SafetensorsReader(tmp_path)
    tensors = {name: reader.read(name) for name in reader.names()}
    stem = "model.layers.0.mlp.down_proj"
    changes: list[tuple[dict[str, Tensor], str]] = [
        ({f"{stem}.scales": torch.ones(1, 5)}, r"scales holds \(1, 5\)"),
        ({f"{stem}.qzeros": torch.ones(9, 32, dtype=torch.int32)}, r"qzeros holds \(9, 256\)"),
        ({f"{stem}.qzeros": torch.ones(3, 32)}, "not a matrix of 32-bit words"),
    ]
    for number, (change, message) in enumerate(changes):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({**tensors, **change}, folder / "model.safetensors")
        with pytest.raises(BadWeights, match=message) as found:
            kept(reader_of(folder, "awq", 128))
        assert "\n" not in str(found.value)


def test_checkpoints_without_four_bits_are_refused(tmp_path: Path) -> None:
    save_file(numbers(), tmp_path / "model.safetensors")
    with pytest.raises(
        BadConfig, match=r"^quantization int4 keeps matrices that are in 4 bits, and this model has none"
    ):
        kept(SafetensorsReader(tmp_path))
    file = GgufFile(write(tmp_path / "m.gguf", "llama", hf_weights("llama"), Q.Q8_0))
    with pytest.raises(BadConfig, match="or a GGUF file of Q4_0, Q4_1 or Q4_K"):
        kept(ArrayReader(file), file)


# ---- GGUF -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q4_K])
def test_gguf_files_stay_in_four_bits(kind: Q, arch: str, tmp_path: Path) -> None:
    """As the package dequantizes them, rows of q and k in Hugging Face's order; embeddings in Q8_0 stay in 8 bits."""
    path = write(
        tmp_path / "m.gguf", arch, hf_weights(arch, tied=True), kind, kinds={"model.embed_tokens.weight": Q.Q8_0}
    )
    file = GgufFile(path)
    spec, reader = spec_from_config(file.config()), ArrayReader(file)
    meant = {name: torch.from_numpy(file.read(name)) for name in file.tensor_names()}
    params = kept(reader, file, spec)
    check(params, meant, spec)
    for name, weight in params.weights.items():
        assert isinstance(weight, BlockWeight)
        assert weight.bits == (8 if name == "embedding.weight" else 4)
    embedding = params.weights["embedding.weight"]
    ops, ids = kernels.pick("cpu"), torch.tensor([5, 0, 63])
    assert torch.equal(ops.embed(ids, ops.prepare(embedding)), meant["model.embed_tokens.weight"][ids])


def test_matrices_of_several_types(tmp_path: Path) -> None:
    """Q4_0 and Q4_K are joined; beside another type none of a joined matrix is kept."""
    layer = "model.layers.0"
    kinds = {f"{layer}.self_attn.v_proj.weight": Q.Q5_0, f"{layer}.mlp.up_proj.weight": Q.Q4_K}
    file = GgufFile(write(tmp_path / "m.gguf", "llama", hf_weights("llama"), Q.Q4_0, kinds=kinds))
    spec, reader = spec_from_config(file.config()), ArrayReader(file)
    params = kept(reader, file, spec)
    check(params, {name: torch.from_numpy(file.read(name)) for name in file.tensor_names()}, spec)
    assert isinstance(params.weights["layers.0.qkv.weight"], DenseWeight)
    assert isinstance(params.weights["layers.1.qkv.weight"], BlockWeight)
    joined = params.weights["layers.0.gate_up.weight"]
    assert isinstance(joined, BlockWeight)
    assert joined.scales.dtype == torch.float32


@pytest.mark.parametrize("kind", FROM_BLOCKS)
def test_any_bytes_mean_what_the_package_says(kind: str) -> None:
    """Scales of all sizes; not those that are no numbers."""
    sizes = gguf.GGML_QUANT_SIZES[Q[kind]]
    raw = np.random.default_rng(3).integers(256, size=(7, 4, sizes[1]), dtype=np.uint8)
    raw[..., 1] &= 0xBF  # of the first factor, below 2
    if kind in ("Q4_1", "Q4_K"):
        raw[..., 3] &= 0xBF
    wanted = gguf.dequantize(raw.reshape(7, -1), Q[kind])
    assert torch.equal(FROM_BLOCKS[kind](torch.from_numpy(raw)).dense(), torch.from_numpy(wanted))


def test_random_weights_in_four_bits() -> None:
    """For benchmarks; sizes that are no multiple of 32 stay as they are."""
    weight, odd = DenseWeight(torch.randn(8, 64)), DenseWeight(torch.randn(8, 40))
    assert isinstance(to_int4(weight), BlockWeight)
    assert to_int4(odd) is odd
