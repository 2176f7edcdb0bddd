"""Weights that lie: GGUF files with absurd metadata, counts and tensors; safetensors files, headers and indexes."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.files.gguf import GgufFile
from tests.effort import share
from tests.files.hostile import (
    ARRAY,
    BOOL,
    F32,
    NO_FILES,
    STRING,
    U32,
    U64,
    Pair,
    gguf_bytes,
    pair_bytes,
    refusal,
    said_by,
    sparse,
    text_bytes,
)

HIDDEN, HEADS, FEED, VOCAB, HEAD = 32, 4, 64, 40, 8
WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "▁", "ab", "cd", "▁a", *"0123!?."]


def metadata(kind: str = "gpt2") -> dict[str, Pair]:
    sizes = {
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FEED,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": HEADS,
        "llama.attention.key_length": HEAD,
        "llama.attention.value_length": HEAD,
        "llama.rope.dimension_count": HEAD,
        "llama.rope.scaling.original_context_length": 64,
        "llama.expert_count": 0,
        "llama.attention.sliding_window": 0,
        "split.count": 1,
        "general.alignment": 32,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {
        "general.architecture": (STRING, "llama"),
        **{key: (U32, value) for key, value in sizes.items()},
        "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        "llama.rope.freq_base": (F32, 1e4),
        "llama.rope.scaling.type": (STRING, "yarn"),
        "llama.rope.scaling.factor": (F32, 2.0),
        "llama.rope.scaling.attn_factor": (F32, 1.0),
        "llama.rope.scaling.yarn_beta_fast": (F32, 32.0),
        "tokenizer.ggml.model": (STRING, kind),
        "tokenizer.ggml.pre": (STRING, "default"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, WORDS)),
        "tokenizer.ggml.token_type": (ARRAY, (U32, [2, 3, 3] + [1] * (VOCAB - 3))),
        "tokenizer.ggml.scores": (ARRAY, (F32, [0.0] * VOCAB)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b", "c d"])),
        "tokenizer.ggml.add_bos_token": (BOOL, True),
        "tokenizer.ggml.add_space_prefix": (BOOL, True),
        "tokenizer.chat_template": (STRING, "{{ messages[0].content }}"),
    }


def tensors() -> list[tuple[str, tuple[int, ...], int, int]]:
    shapes = {"token_embd": (HIDDEN, VOCAB), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,)}
    shapes |= {f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_norm": (HIDDEN,), "blk.0.ffn_gate": (HIDDEN, FEED), "blk.0.ffn_up": (HIDDEN, FEED)}
    shapes |= {"blk.0.ffn_down": (FEED, HIDDEN)}
    found, offset = [], 0
    for name, shape in shapes.items():
        found.append((f"{name}.weight", shape, 0, offset))
        offset += 4 * torch.Size(shape).numel()
    return found


DATA = 4 * sum(torch.Size(shape).numel() for _, shape, _, _ in tensors())


def made(path: Path, change: Mapping[str, Pair] | None = None, kind: str = "gpt2") -> Path:
    path.write_bytes(gguf_bytes({**metadata(kind), **(change or {})}, tensors(), DATA))
    return path


ABSURD_PAIRS: list[Pair] = [
    *((STRING, text) for text in ("", "a", "12", b"\xff\xfe", "x" * 10**6)),
    *((U32, number) for number in (0, 1, 3, 10**6, 10**9, 2**31, 2**32 - 1)),
    *((U64, number) for number in (2**63, 2**64 - 1)),
    *((11, number) for number in (-1, -(2**63))),
    *((F32, number) for number in (0.0, -1.0, 2.5, 1e-30, 3e38, float("nan"), float("inf"))),
    *((12, number) for number in (1e-320, 1.7e308)),
    (BOOL, True),
    (BOOL, False),
    (ARRAY, (U32, [])),
    (ARRAY, (U32, [1, 2])),
    (ARRAY, (U32, list(range(VOCAB)))),
    (ARRAY, (STRING, [])),
    (ARRAY, (STRING, ["a"] * VOCAB)),
    (ARRAY, (STRING, ["x" * 100_000] * VOCAB)),
    (ARRAY, (F32, [float("nan")] * VOCAB)),
    (ARRAY, (BOOL, [True] * VOCAB)),
    (ARRAY, (ARRAY, [(U32, [1])] * VOCAB)),
]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_file_itself_is_good(tmp_path: Path, kind: str) -> None:
    assert refusal(made(tmp_path / "good.gguf", kind=kind)) == ""


@pytest.mark.parametrize("key", metadata())
def test_absurd_metadata(tmp_path: Path, key: str) -> None:
    """Every key that is read, as every kind of value; without it, too."""
    number = list(metadata()).index(key)
    for kind in ("gpt2", "llama") if key.startswith("tokenizer.ggml") else ("gpt2",):
        for pair in share(ABSURD_PAIRS, number + len(kind), of=3):
            said = refusal(made(tmp_path / "bad.gguf", {key: pair}, kind))
            assert len(said) < 1200
            if pair == (STRING, "a") and not key.startswith("tokenizer."):
                assert said, f"{key} as a text was taken"
        rest = {name: pair for name, pair in metadata(kind).items() if name != key}
        (tmp_path / "bad.gguf").write_bytes(gguf_bytes(rest, tensors(), DATA))
        refusal(tmp_path / "bad.gguf")


def test_absurd_counts(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    good = made(path).read_bytes()
    head = len(b"GGUF") + struct.calcsize("<IQQ") + len(pair_bytes(metadata()))
    for count in (0, 1, 10**6, 2**31, 2**32 - 1, 2**63, 2**64 - 1):
        for name in ("tensor_count", "pair_count"):
            path.write_bytes(gguf_bytes(metadata(), tensors(), DATA, **{name: count}))
            assert refusal(path)
        for version in (0, 1, 4, 2**32 - 1):
            path.write_bytes(gguf_bytes(metadata(), tensors(), DATA, version=version))
            assert refusal(path)
        # the first key's length, the first tensor's name's length, an array's length, and both of an array of arrays
        path.write_bytes(good[:24] + struct.pack("<Q", count) + good[32:])
        assert refusal(path)
        path.write_bytes(good[:head] + struct.pack("<Q", count) + good[head + 8 :])
        assert refusal(path)
        for inner in (U32, STRING, ARRAY, 77):
            path.write_bytes(
                struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + text_bytes("a") + struct.pack("<IIQ", ARRAY, inner, count)
            )
            assert refusal(path)


def test_a_terabyte_of_header(tmp_path: Path) -> None:
    """A file that really is as large as it claims, though all of it is a hole."""
    path = tmp_path / "hole.gguf"
    for pairs, tensor_count, tail in (
        (2**16, 0, b""),
        (0, 2**20, b""),
        (1, 0, text_bytes("a") + struct.pack("<IIQ", ARRAY, STRING, 2**36)),
        (1, 0, text_bytes("a") + struct.pack("<IIQ", ARRAY, U32, 2**36)),
        (1, 0, text_bytes("a") + struct.pack("<IIQ", ARRAY, ARRAY, 2**36)),
        (1, 0, text_bytes("a") + struct.pack("<IQ", STRING, 2**36)),
    ):
        sparse(path, 2**40)
        with path.open("r+b") as file:
            file.write(struct.pack("<4sIQQ", b"GGUF", 3, tensor_count, pairs) + tail)
        # without a limit of address space: the file is mapped
        assert "hole.gguf" in said_by(lambda: GgufFile(path))


def test_absurd_tensors(tmp_path: Path) -> None:
    path, good = tmp_path / "bad.gguf", tensors()
    name, shape, _, offset = good[4]

    def with_tensor(*changed: tuple[str, tuple[int, ...], int, int]) -> str:
        path.write_bytes(gguf_bytes(metadata(), [*good[:4], *changed, *good[5:]], DATA))
        return refusal(path)

    assert with_tensor(good[4]) == ""
    for size in (0, 1, 31, 10**6, 10**9, 2**31, 2**32 - 1, 2**63, 2**64 - 1):
        for bad in ((size, HIDDEN), (HIDDEN, size), (size,), (size, size, size, size), (HIDDEN, HIDDEN, size, 0)):
            assert with_tensor((name, bad, 0, offset)), bad
    for n in (0, 1, 3, 4, 5, 100):
        assert with_tensor((name, (HIDDEN,) * n, 0, offset))
    for kind in (1, 2, 3, 8, 14, 24, 26, 28, 30, 99, 2**31, 2**32 - 1):
        with_tensor((name, shape, kind, offset))  # another type may have fewer bytes
    for bad_offset in (1, 4, 10**9, 2**63, 2**64 - 1, offset - 32, 0):
        assert with_tensor((name, shape, 0, bad_offset)), bad_offset
    assert "two tensors named" in with_tensor(good[4], good[4])
    assert "overlap" in with_tensor((name, shape, 0, good[3][3]))
    assert with_tensor()
    for bad_name in ("", "blk.1.attn_q.weight", "blk.99999999999.attn_q.weight", "x" * 10**6, "\n\x1b", "a/../b"):
        assert with_tensor((bad_name, shape, 0, offset))
    for shape_of_factors in ((HEAD // 2,), (0,), (1,), (HEAD // 2, 2), (10**9,)):
        path.write_bytes(gguf_bytes(metadata(), [("rope_freqs.weight", shape_of_factors, 0, DATA), *good], DATA + 64))
        assert "rope_freqs.weight" in refusal(path)  # all zeros are no factors


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("kind", NO_FILES)
def test_something_else_in_place_of_a_gguf_file(tmp_path: Path, kind: str) -> None:
    NO_FILES[kind](tmp_path / "m.gguf")
    assert said_by(lambda: GgufFile(tmp_path / "m.gguf"))
    assert refusal(tmp_path / "m.gguf")
    assert refusal(tmp_path)  # the only one of its folder


# ---- safetensors -----------------------------------------------------------------------------------------------------


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def with_header(path: Path, header: Any, data: bytes, size: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if size is None else size) + raw + data)


NAME = "model.layers.0.self_attn.q_proj.weight"


def test_absurd_headers(folder: Path) -> None:
    path = folder / "model.safetensors"
    header, data = header_of(path)
    good = header[NAME]
    changes: list[dict[str, Any]] = [
        *({"dtype": kind} for kind in ("F64", "F16", "BF16", "I64", "BOOL", "F8_E4M3", "F4", "E8M0", "", 5, None, [])),
        *(
            {"shape": shape}
            for shape in ([64], [64, 63], [0, 0], [-1, -4096], [2**63, 2], [], "a", None, [1.5], [4096])
        ),
        *({"data_offsets": span} for span in ([0, 0], [0, 2**63], [2**64 - 1, 3], [5, 1], [-1, 4], [0], "a", None)),
        *({"data_offsets": [good["data_offsets"][0] - by, good["data_offsets"][1] - by]} for by in (4, -4, 4096)),
    ]
    for change in changes:
        with_header(path, {**header, NAME: {**good, **change}}, data)
        assert refusal(path.parent), change
    for bad in (b"", b"{", b"[]", b"null", b"\xff" * 100, b'{"a":' * 10_000, b" " * 1000, b'{"__metadata__": 3}'):
        with_header(path, bad, data)
        assert refusal(path.parent)
    raw = json.dumps(header).encode()
    twice = raw[:-1] + b", " + json.dumps({NAME: good}).encode()[1:]
    with_header(path, twice, data)
    refusal(path.parent)  # the library takes the last one
    for size in (0, 1, len(raw) - 1, len(raw) + 1, 10**8, 10**9, 2**31, 2**32, 2**63, 2**64 - 1):
        with_header(path, header, data, size)
        assert refusal(path.parent), size


def test_absurd_types_of_all_tensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for kind in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64, torch.uint8):
        save_file({name: tensor.to(kind) for name, tensor in tensors.items()}, path)
        refusal(folder)


def test_absurd_indexes(folder: Path) -> None:
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    names = list(load_file(weights))
    weights.rename(folder / "a.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    assert refusal(folder) == ""
    (folder.parent / "b.safetensors").symlink_to(folder / "a.safetensors")
    absolute = str(folder / "a.safetensors")
    for place in ("../b.safetensors", absolute, "", ".", "..", "/", "a.safetensors/", "\0", "b", "a" * 5000, "\ud800"):
        for bad in (dict.fromkeys(names, place), {**dict.fromkeys(names, "a.safetensors"), names[0]: place}):
            index.write_text(json.dumps({"weight_map": bad}))
            assert refusal(folder), place
    for value in (5, None, [], {}, True, 2.5):
        index.write_text(json.dumps({"weight_map": {**dict.fromkeys(names, "a.safetensors"), names[0]: value}}))
        assert refusal(folder)
        index.write_text(json.dumps({"weight_map": value}))
        assert refusal(folder)
    index.write_text(json.dumps({"weight_map": {str(number): "a.safetensors" for number in range(100_000)}}))
    assert refusal(folder)


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("kind", NO_FILES)
def test_something_else_in_place_of_a_shard(folder: Path, kind: str) -> None:
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "s.safetensors")})
    )
    NO_FILES[kind](folder / "s.safetensors")
    assert "s.safetensors" in refusal(folder)
