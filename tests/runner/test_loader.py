"""Weights into place, and every way a checkpoint can be wrong."""

import json
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shoal.errors import BadWeights, ModelError, ModelNotFound, UnknownName, UnsafeWeights
from shoal.kernels import cpu, pick
from shoal.kernels.weights import DenseWeight, Int8Weight, Parameters, Weight
from shoal.models import make_model, model_class, spec_from_config
from shoal.models.layout import places, shapes
from shoal.runner.loader import (
    ArrayReader,
    SafetensorsReader,
    dummy_weights,
    load_weights,
    pick_dtype,
    to_int8,
    untied_if_both,
)
from tests.kernels.ragged import Tables

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}
SPEC = spec_from_config(CONFIG)
TIED = spec_from_config({**CONFIG, "tie_word_embeddings": True})


def checkpoint() -> dict[str, torch.Tensor]:
    return {name: torch.randn(place.shape) for name, place in places(model_class(SPEC).layout(SPEC)).items()}


def load(folder: Path, spec: Any = SPEC) -> dict[str, torch.Tensor]:
    return tensors_of(load_weights(SafetensorsReader(folder), spec, torch.float32, "cpu"))


def tensors_of(params: Parameters) -> dict[str, torch.Tensor]:
    assert all(isinstance(weight, DenseWeight) for weight in params.weights.values())
    return {name: weight.dense() for name, weight in params.weights.items()} | params.vectors


def save_shards(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file_name, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file_name)
    index = {"weight_map": {name: file_name for file_name, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_single_file_and_shards_give_the_same_fused_parameters(tmp_path: Path) -> None:
    tensors = checkpoint()
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    save_file(tensors, one / "model.safetensors")
    save_shards(tensors, many)
    found, again = load(one), load(many)
    assert found.keys() == again.keys() == dict(shapes(model_class(SPEC).layout(SPEC))).keys()
    assert all(torch.equal(found[name], again[name]) for name in found)
    parts = [tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(found["layers.1.qkv.weight"], torch.cat(parts))
    biases = [tensors[f"model.layers.0.self_attn.{part}_proj.bias"] for part in "qkv"]
    assert torch.equal(found["layers.0.qkv.bias"], torch.cat(biases))


def test_values_are_cast_and_progress_may_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = checkpoint()
    save_file(tensors, tmp_path / "model.safetensors")
    found = tensors_of(load_weights(SafetensorsReader(tmp_path), SPEC, torch.bfloat16, "cpu", progress=True))
    assert torch.equal(found["head.weight"], tensors["lm_head.weight"].bfloat16())
    assert "weights" in capsys.readouterr().err


class Arrays:
    """An ArrayFile of read-only arrays, as memory maps are."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
        for array in self.arrays.values():
            array.flags.writeable = False

    def tensor_names(self) -> Iterable[str]:
        return self.arrays

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def read(self, name: str, index: tuple[slice, ...] = ()) -> "np.ndarray[Any, Any]":
        return self.arrays[name][index]


def test_arrays_are_read_too(tmp_path: Path) -> None:
    tensors = checkpoint()
    save_file(tensors, tmp_path / "model.safetensors")
    found = tensors_of(load_weights(ArrayReader(Arrays(tensors)), SPEC, torch.float32, "cpu"))
    assert all(torch.equal(found[name], wanted) for name, wanted in load(tmp_path).items())


def test_harmless_extras_are_ignored_and_others_named(tmp_path: Path) -> None:
    tensors = checkpoint()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "head.weight" not in load(tmp_path, TIED)
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    with pytest.raises(BadWeights, match=r"q_norm\.weight is not part of this model"):
        load(tmp_path)


def test_an_lm_head_of_its_own_is_used_though_the_config_ties_it(tmp_path: Path) -> None:
    tensors = checkpoint()
    save_file(tensors, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert untied_if_both(reader, TIED) == SPEC
    assert untied_if_both(reader, SPEC) is SPEC
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert untied_if_both(SafetensorsReader(tmp_path), TIED) is TIED


class Boundless:
    """A reader that must not be read: its tensors are of other shapes than the config's."""

    def names(self) -> Iterable[str]:
        return checkpoint()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(checkpoint()[name].shape)

    def read(self, name: str, cut: Any = None) -> torch.Tensor:
        raise AssertionError(f"{name} was read")


def test_shapes_are_compared_before_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*args: Any, **more: Any) -> torch.Tensor:
        raise AssertionError(f"memory was allocated: {args}")

    monkeypatch.setattr("shoal.runner.loader.torch.empty", empty)
    absurd = spec_from_config({**CONFIG, "vocab_size": 2**24, "intermediate_size": 2**31 - 1})
    with pytest.raises(BadWeights, match=r"embed_tokens\.weight is 50x32, the config needs 16777216x32"):
        load_weights(Boundless(), absurd, torch.float32, "cpu")


def test_missing_tensors_are_listed_up_to_five(tmp_path: Path) -> None:
    tensors = checkpoint()
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadWeights) as caught:
        load(tmp_path)
    assert "model.layers.1.self_attn.q_proj.weight 32x32 is missing" in str(caught.value)
    assert str(caught.value).count("is missing") == 5
    assert "and 7 more" in str(caught.value)


def test_wrong_shapes_and_types_are_named(tmp_path: Path) -> None:
    tensors = checkpoint()
    tensors["model.embed_tokens.weight"] = torch.randn(51, 32)
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadWeights, match=r"embed_tokens\.weight is 51x32, the config needs 50x32"):
        load(tmp_path)
    tensors["model.embed_tokens.weight"] = torch.randn(50, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadWeights, match=r"model\.norm\.weight holds torch\.int8, floating point is needed"):
        load(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        SafetensorsReader(tmp_path / "nowhere")
    with pytest.raises(BadWeights, match=r"neither model\.safetensors"):
        SafetensorsReader(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(checkpoint(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadWeights, match=r"model\.safetensors is truncated"):
        SafetensorsReader(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(BadWeights, match=r"model\.safetensors is truncated"):
        SafetensorsReader(tmp_path)
    path.write_bytes(b"\xff" * 500)
    with pytest.raises(BadWeights, match=r"model\.safetensors is truncated or not"):
        SafetensorsReader(tmp_path)


def test_broken_shards_are_named(tmp_path: Path) -> None:
    save_shards(checkpoint(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    (tmp_path / "b.safetensors").rename(tmp_path / "c.safetensors")
    with pytest.raises(BadWeights, match=r"b\.safetensors is missing"):
        SafetensorsReader(tmp_path)
    (tmp_path / "c.safetensors").rename(tmp_path / "b.safetensors")
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], "ghost": "a.safetensors"}}))
    with pytest.raises(BadWeights, match=r"a\.safetensors lacks ghost"):
        SafetensorsReader(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    with pytest.raises(BadWeights, match="not a file of this folder"):
        SafetensorsReader(tmp_path)
    for nonsense in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"x": 3}}'):
        index.write_text(nonsense)
        with pytest.raises(ModelError, match=r"index\.json"):
            SafetensorsReader(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "a.ckpt", "b.pkl"])
def test_pickles_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n")
    with pytest.raises(UnsafeWeights, match=r"convert them to model\.safetensors"):
        SafetensorsReader(tmp_path)


def test_dummy_weights_make_a_well_behaved_model() -> None:
    spec = spec_from_config({**CONFIG, "vocab_size": 40_000, "hidden_size": 128, "intermediate_size": 256})
    params = dummy_weights(spec, torch.float32, "cpu", seed=3)
    one, again, other = (tensors_of(dummy_weights(spec, torch.float32, "cpu", seed=seed)) for seed in (3, 3, 4))
    assert {name: tuple(tensor.shape) for name, tensor in one.items()} == dict(shapes(model_class(spec).layout(spec)))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])
    assert bool((one["norm.weight"] == 1).all())
    tables = Tables([9], 4)
    shape = (tables.blocks, 4, spec.kv_heads, spec.head_dim)
    kv = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(spec.layers)]
    model = make_model(spec, params, pick("cpu"))
    with torch.inference_mode():
        logits = model.logits(model.forward(torch.arange(9), tables.batch([(0, 0, 9)]), kv))
    assert 0.3 < float(logits.std()) < 3


def test_weights_are_converted_one_at_a_time() -> None:
    """Each dense one is freed before the next is converted; norms and biases stay as they are."""
    params = dummy_weights(SPEC, torch.bfloat16, "cpu")
    names, alive = list(params.weights), [weakref.ref(weight) for weight in params.weights.values()]

    def convert(weight: Weight) -> Weight:
        done = sum(isinstance(one, Int8Weight) for one in params.weights.values())
        assert [one() is None for one in alive] == [number < done for number in range(len(alive))]
        return to_int8(weight)

    vectors = dict(params.vectors)
    params.convert(convert)
    assert list(params.weights) == names
    assert all(isinstance(weight, Int8Weight) for weight in params.weights.values())
    assert params.vectors == vectors


def test_pick_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_dtype("float16", SPEC, "cpu") == torch.float16
    assert pick_dtype("auto", SPEC, "cuda") == torch.bfloat16
    wide = spec_from_config({**CONFIG, "torch_dtype": "float32"})
    monkeypatch.setattr(cpu, "has_bfloat16_products", lambda: True)
    assert pick_dtype("auto", SPEC, "cpu") == torch.bfloat16
    assert pick_dtype("auto", wide, "cpu") == torch.float32
    monkeypatch.setattr(cpu, "has_bfloat16_products", lambda: False)
    assert pick_dtype("auto", SPEC, "cpu") == torch.float32
    with pytest.raises(UnknownName, match=r"int4.*auto, float32, bfloat16, float16"):
        pick_dtype("int4", SPEC, "cpu")
