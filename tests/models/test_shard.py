"""Parts of a model: together they are the whole, none holds more than its part, and what does not fit is refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shoal.errors import BadConfig
from shoal.files.gguf import GgufFile
from shoal.models import ModelSpec, model_class, spec_from_config
from shoal.models.layout import Cut, places, shapes
from shoal.models.shard import WHOLE, SplitShard
from shoal.runner.loader import ArrayReader, SafetensorsReader, dummy_weights, load_weights
from tests.files import ggufs

NO_GROUP: Any = None  # nothing is computed
SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 70,
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 100,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "mlp_bias": True,
}


def shards(size: int) -> list[SplitShard]:
    return [SplitShard(rank, size, NO_GROUP) for rank in range(size)]


def spec_of(**changes: Any) -> ModelSpec:
    return spec_from_config({**SIZES, **changes})


@pytest.mark.parametrize("size", [2, 3])
def test_parts_cover_every_tensor_once(size: int) -> None:
    spec = spec_of()
    for name, place in places(model_class(spec).layout(spec)).items():
        held = np.zeros(place.shape, dtype=int)
        for shard in shards(size):
            held[shard.cut(spec, name, place.shape).index] += 1
        once = held.min() == held.max() == 1
        everywhere = held.min() == held.max() == size
        split = not ("norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")))
        assert once if split else everywhere, name


@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_that_a_rank_holds_fit_its_spec(size: int) -> None:
    """What the loader allocates is the layout of the local model, but for the vocabulary."""
    spec = spec_of()
    for shard in shards(size):
        local = shard.local(spec)
        assert local.heads == 2 * local.kv_heads
        cut = dict(shapes(model_class(spec).layout(spec), partial(shard.cut, spec)))
        for name, shape in shapes(model_class(local).layout(local)):
            if name in ("embedding.weight", "head.weight"):
                assert cut[name] == (shard.vocab_part(70), 48)
            else:
                assert cut[name] == shape, name
    assert sum(shard.local(spec).intermediate_size for shard in shards(size)) == 100
    most = max(shard.local(spec).parameters - 2 * 70 * 48 for shard in shards(size))
    assert most < 0.75 * (spec.parameters - 2 * 70 * 48), "no rank holds the whole"


def test_kv_heads_are_held_by_several_ranks_if_there_are_fewer() -> None:
    spec = spec_of(num_attention_heads=8, num_key_value_heads=2)
    rows = [shard.cut(spec, "model.layers.0.self_attn.k_proj.weight", (12, 48)) for shard in shards(4)]
    assert [cut.first // spec.head_dim for cut in rows] == [0, 0, 1, 1]
    queries = [shard.cut(spec, "model.layers.0.self_attn.q_proj.weight", (48, 48)) for shard in shards(4)]
    assert [cut.first // spec.head_dim for cut in queries] == [0, 2, 4, 6]
    assert {cut.count // spec.head_dim for cut in queries} == {2}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "use"),
    [(6, 3, 4, "use 1 to 3, 6"), (6, 2, 4, "use 1 to 2, 6"), (8, 1, 3, "use 1, 2, 4, 8"), (4, 4, 5, "use 1 to 4$")],
)
def test_heads_that_do_not_fit_are_refused(heads: int, kv_heads: int, size: int, use: str) -> None:
    spec = spec_of(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8)
    with pytest.raises(BadConfig, match=f"{size} does not fit a model with {heads} query heads .*{use}"):
        shards(size)[0].check(spec)


def test_an_inner_size_below_the_ranks_is_refused() -> None:
    with pytest.raises(BadConfig, match="exceeds the intermediate size 2"):
        shards(3)[0].check(spec_of(intermediate_size=2))


# ---- weights from files ---------------------------------------------------------------------------------------------


def joined(parts: list[dict[str, torch.Tensor]], spec: ModelSpec, size: int) -> dict[str, torch.Tensor]:
    """The whole parameters from those of all ranks."""
    found = {}
    layout = list(model_class(spec).layout(spec))
    whole = {name: torch.full(shape, torch.nan) for name, shape in shapes(layout)}
    places_of = places(layout)
    for shard, part in zip(shards(size), parts, strict=True):
        cuts = places(layout, partial(shard.cut, spec))
        for name, place in places_of.items():
            cut, first = cuts[name].cut, cuts[name].first
            held = part[place.parameter][first : first + cuts[name].rows].narrow(cut.axis, 0, cut.count)
            rest = part[place.parameter][first : first + cuts[name].rows].narrow(
                cut.axis, cut.count, cut.room - cut.count
            )
            assert not rest.any(), "zeros behind the vocabulary"
            whole[place.parameter][place.first : place.first + place.rows][cut.index] = held
    found.update(whole)
    return found


def tensors(params: Any) -> dict[str, torch.Tensor]:
    return {name: weight.dense() for name, weight in params.weights.items()} | params.vectors


@pytest.mark.parametrize("size", [2, 3])
def test_safetensors_are_read_by_slice(size: int, tmp_path: Path) -> None:
    spec = spec_of()
    wanted = {name: torch.randn(place.shape) for name, place in places(model_class(spec).layout(spec)).items()}
    save_file(wanted, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    whole = tensors(load_weights(SafetensorsReader(tmp_path), spec, torch.float32, "cpu"))
    parts = []
    for shard in shards(size):
        reader = Watched(SafetensorsReader(tmp_path))
        parts.append(tensors(load_weights(reader, spec, torch.float32, "cpu", shard=shard)))
        whole_ones = {name for name in reader.read_whole if "norm" not in name}
        assert whole_ones == {f"model.layers.0.{name}.bias" for name in ("self_attn.o_proj", "mlp.down_proj")}
    found = joined(parts, spec, size)
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name


class Watched:
    """A reader that notes which tensors were read whole."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.read_whole = inner, set[str]()
        self.names, self.shape = inner.names, inner.shape

    def read(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        found: torch.Tensor = self.inner.read(name, cut)
        if found.shape == self.inner.shape(name):
            self.read_whole.add(name)
        return found


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", [ggufs.Q.F32, ggufs.Q.Q8_0, ggufs.Q.Q4_1])
def test_gguf_is_read_by_slice(arch: str, kind: Any, tmp_path: Path) -> None:
    """Also where a part ends within a block of quantized values, and where q and k are interleaved."""
    file = GgufFile(ggufs.write(tmp_path / "m.gguf", arch, ggufs.hf_weights(arch), kind))
    spec, reader = spec_from_config(file.config()), ArrayReader(file)
    whole = tensors(load_weights(reader, spec, torch.float32, "cpu"))
    parts = [tensors(load_weights(reader, spec, torch.float32, "cpu", shard=shard)) for shard in shards(2)]
    found = joined(parts, spec, 2)
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name
    name = "model.layers.1.mlp.down_proj.weight"
    assert np.array_equal(file.read(name, (slice(None), slice(5, 77))), file.read(name)[:, 5:77])
    assert np.array_equal(file.read(name, (slice(3, 9),)), file.read(name)[3:9])


@pytest.mark.parametrize("size", [2, 3])
def test_random_weights_are_parts_of_the_same(size: int) -> None:
    spec = spec_of()
    whole = tensors(dummy_weights(spec, torch.float32, "cpu", seed=3))
    found = joined([tensors(dummy_weights(spec, torch.float32, "cpu", 3, shard)) for shard in shards(size)], spec, size)
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name


def test_one_process_is_a_shard_that_does_nothing() -> None:
    spec = spec_of()
    assert WHOLE.local(spec) is spec
    x = torch.randn(2, 3)
    assert WHOLE.scores(x, 3) is x
    assert WHOLE.agreed(x) is x
