"""One GGUF file, read as if it were a Hugging Face folder: config keys, tensor names and float32 values.

Owns the translation of names, shapes and the rotary order, and the dequantization; or gives a matrix as it is stored.
Does not know torch or devices.
"""

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.errors import BadWeights, UnsupportedModel, shown
from shoal.files.gguf_header import TensorInfo, map_file, read_header
from shoal.files.reading import is_integer
from shoal.files.rope import SCALING_KEYS, rope_scaling

Floats = NDArray[np.float32]
Number = TypeVar("Number", np.float32, np.uint8)

# general.architecture → (Hugging Face class, model_type, are q and k stored in interleaved rotary order?)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama", True),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", False),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", False),
}
_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
# Large enough that numpy runs mostly without the interpreter lock, small enough for the processor's cache.
_CHUNK = 4096 * 32


class GgufFile:
    """A memory-mapped GGUF file; tensors are read and dequantized one by one, from any thread."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._buffer = map_file(self.path)
        header = read_header(self._buffer, self.path)
        self.metadata: dict[str, Any] = header.metadata
        self._data_start = header.data_start
        self._stored = {tensor.name: tensor for tensor in header.tensors}
        self.architecture = self._known_architecture()
        self._by_hf_name = {
            self._hf_name(name): tensor for name, tensor in self._stored.items() if name != _ROPE_FACTORS
        }
        self._check_spans(header.tensors)

    def config(self) -> dict[str, Any]:
        """The model's shape in the keys of a Hugging Face config.json."""
        class_name, model_type, _ = ARCHITECTURES[self.architecture]
        window = self._integer("attention.sliding_window", 0)
        if model_type == "llama" and window:
            class_name, model_type = "MistralForCausalLM", "mistral"
        heads = self._integer("attention.head_count")
        embedding = self._embedding_shape()
        return {
            "architectures": [class_name],
            "model_type": model_type,
            "hidden_act": "silu",
            "hidden_size": embedding[1],
            "vocab_size": embedding[0],
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", heads),
            "head_dim": self._head_dim(),
            "intermediate_size": self._integer("feed_forward_length"),
            "max_position_embeddings": self._integer("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon", 1e-5),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "sliding_window": window or None,
            "tie_word_embeddings": "output.weight" not in self._stored,
            "attention_bias": "blk.0.attn_q.bias" in self._stored,
            "mlp_bias": "blk.0.ffn_up.bias" in self._stored,
            "bos_token_id": self._token_id("bos"),
            "eos_token_id": self._eos_ids(),
        }

    def tensor_names(self) -> list[str]:
        """The Hugging Face names of all weights, in file order."""
        return list(self._by_hf_name)

    def shape(self, hf_name: str) -> tuple[int, ...]:
        """The shape that `read` will return."""
        return self._find(hf_name).shape

    def read(self, hf_name: str, index: tuple[slice, ...] = ()) -> Floats:
        """One weight as a fresh float32 array, rows in Hugging Face's rotary order.

        index: a part of its rows, or all rows and a part of their columns; the rest is not dequantized, but for whole
        blocks at a part's ends. A part of q or k must consist of whole heads.
        """
        tensor = self._find(hf_name)
        values = self._dequantize_part(tensor, index) if index else self._dequantize(tensor)
        return self._in_order(values, hf_name, tensor)

    def kind(self, hf_name: str) -> str:
        """The type of one weight by ggml's name, such as Q4_K."""
        import gguf

        return str(gguf.GGMLQuantizationType(self._find(hf_name).type_code).name)

    def blocks(self, hf_name: str) -> NDArray[np.uint8]:
        """One matrix as it is stored, [rows, blocks, bytes a block], rows in Hugging Face's rotary order."""
        tensor = self._find(hf_name)
        start, blocks, elements, n_bytes = self._span(tensor)
        if len(tensor.shape) != 2 or tensor.shape[1] % elements:
            raise self._ragged(tensor, elements)
        raw = np.frombuffer(self._buffer, np.uint8, blocks * n_bytes, start).reshape(tensor.shape[0], -1, n_bytes)
        return self._in_order(raw, hf_name, tensor)

    def _in_order(self, values: NDArray[Number], hf_name: str, tensor: TensorInfo) -> NDArray[Number]:
        """Rows of q and k in Hugging Face's order."""
        permuted = ARCHITECTURES[self.architecture][2]
        if permuted and ".self_attn.q_proj." in hf_name:
            return self._unpermute(values, tensor, self._integer("attention.head_count"))
        if permuted and ".self_attn.k_proj." in hf_name:
            heads = self._integer("attention.head_count")
            return self._unpermute(values, tensor, self._integer("attention.head_count_kv", heads))
        return values

    def _known_architecture(self) -> str:
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{self.path} has architecture {shown(architecture)}; known in GGUF files: {', '.join(ARCHITECTURES)}"
            )
        if self._integer_at("split.count", 1) > 1:
            raise UnsupportedModel(
                f"{self.path} is one part of a split model; merge it with `llama-gguf-split --merge`"
            )
        if self._integer_at(f"{architecture}.expert_count", 0) > 0:
            raise UnsupportedModel(f"{self.path} is a mixture of experts; only dense models are read from GGUF files")
        return architecture

    def _hf_name(self, name: str) -> str:
        if name in _WHOLE_MODEL:
            return _WHOLE_MODEL[name]
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None or match[2] not in _IN_LAYER:
            raise UnsupportedModel(
                f"{self.path} has tensor {shown(name)}, which is not part of a {self.architecture} model"
            )
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"

    def _find(self, hf_name: str) -> TensorInfo:
        if hf_name not in self._by_hf_name:
            raise BadWeights(f"{self.path} has no tensor {hf_name}; the file does not fit its own config")
        return self._by_hf_name[hf_name]

    def _get(self, key: str, default: Any) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def _integer(self, key: str, default: int | None = None) -> int:
        return self._integer_at(f"{self.architecture}.{key}", default)

    def _integer_at(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(key, default)
        if not is_integer(value):
            raise UnsupportedModel(f"{self.path}: {key} must be one integer, got {shown(value)}; convert it again")
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UnsupportedModel(
                f"{self.path}: {self.architecture}.{key} must be a number, got {shown(value)}; convert it again"
            )
        return value

    def _token_id(self, kind: str) -> int | None:
        key = f"tokenizer.ggml.{kind}_token_id"
        return self._integer_at(key) if key in self.metadata else None

    def _embedding_shape(self) -> tuple[int, ...]:
        shape = self._find("model.embed_tokens.weight").shape
        if len(shape) != 2 or shape[1] != self._integer("embedding_length"):
            raise BadWeights(f"{self.path}: token_embd.weight has shape {shape}, which does not fit embedding_length")
        return shape

    def _head_dim(self) -> int:
        heads = self._integer("attention.head_count")
        head_dim = self._integer("attention.key_length", self._integer("embedding_length") // max(heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            other = self._integer(key, head_dim)
            if other != head_dim:
                raise UnsupportedModel(f"{self.path}: {key} is {other} but a head has {head_dim}; they must be equal")
        return head_dim

    def _rope_scaling(self) -> dict[str, Any] | None:
        factors = self._stored.get(_ROPE_FACTORS)
        if factors is not None and factors.shape != (self._head_dim() // 2,):
            raise BadWeights(
                f"{self.path}: {_ROPE_FACTORS} has shape {factors.shape}, one factor is needed for each of "
                f"{self._head_dim() // 2} frequencies; convert the model again"
            )
        return rope_scaling(
            {key: self._get(f"rope.scaling.{key}", None) for key in SCALING_KEYS},
            None if factors is None else self._dequantize(factors),
            self._number("rope.freq_base", 10000.0),
            self._integer("context_length"),
            self.path,
        )

    def _eos_ids(self) -> list[int]:
        ids = {self._token_id(kind) for kind in ("eos", "eot", "eom")}
        return sorted(i for i in ids if i is not None)

    def _check_spans(self, tensors: Sequence[TensorInfo]) -> None:
        """All within the file, none over another: what is read is no more than the file holds."""
        spans = sorted((*self._span(tensor), tensor.name) for tensor in tensors)
        for (start, blocks, _, n_bytes, first), (next_start, *_, second) in pairwise(spans):
            if start + blocks * n_bytes > next_start:
                raise BadWeights(
                    f"{self.path}: tensors {shown(first)} and {shown(second)} overlap; convert the model again"
                )

    def _span(self, tensor: TensorInfo) -> tuple[int, int, int, int]:
        """(first byte, blocks, elements a block, bytes a block), after checking that they lie in the file."""
        elements, n_bytes = _block_sizes(tensor, self.path)
        count = math.prod(tensor.shape)
        if count % elements:
            raise BadWeights(f"{self.path}: tensor {tensor.name} has {count} values, no multiple of {elements}")
        start = self._data_start + tensor.offset
        if start + count // elements * n_bytes > len(self._buffer):
            raise BadWeights(f"{self.path} is truncated: tensor {tensor.name} ends after the file; download it again")
        return start, count // elements, elements, n_bytes

    def _dequantize(self, tensor: TensorInfo) -> Floats:
        start, blocks, elements, n_bytes = self._span(tensor)
        to_floats = _dequantizer(tensor, self.path)
        raw = np.frombuffer(self._buffer, np.uint8, blocks * n_bytes, start)
        values = np.empty(blocks * elements, np.float32)
        step = max(1, _CHUNK // elements)
        for first in range(0, blocks, step):
            last = min(blocks, first + step)
            piece = raw[first * n_bytes : last * n_bytes].reshape(1, -1)
            values[first * elements : last * elements] = to_floats(piece)[0]
        return values.reshape(tensor.shape)

    def _dequantize_part(self, tensor: TensorInfo, index: tuple[slice, ...]) -> Floats:
        """Rows of the tensor, or columns of all its rows; a vector is one row."""
        start, _, elements, n_bytes = self._span(tensor)
        shape = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
        rows, columns = (slice(None), *index)[-2:] if len(tensor.shape) == 1 else (*index, slice(None))[:2]
        first, last, _ = columns.indices(shape[1])
        if shape[1] % elements:
            raise self._ragged(tensor, elements)
        blocks = slice(first // elements, -(-last // elements))
        size = shape[0] * shape[1] // elements * n_bytes
        raw = np.frombuffer(self._buffer, np.uint8, size, start).reshape(shape[0], -1, n_bytes)[rows, blocks]
        inside = slice(first - blocks.start * elements, last - blocks.start * elements)
        values = np.empty((len(raw), last - first), np.float32)
        to_floats = _dequantizer(tensor, self.path)
        step = max(1, _CHUNK // max(1, raw.shape[1] * elements))
        for at in range(0, len(raw), step):
            piece = np.ascontiguousarray(raw[at : at + step])
            values[at : at + step] = to_floats(piece.reshape(1, -1)).reshape(len(piece), -1)[:, inside]
        return values if len(tensor.shape) > 1 else values[0]

    def _ragged(self, tensor: TensorInfo, elements: int) -> BadWeights:
        return BadWeights(
            f"{self.path}: rows of {tensor.name} are not whole blocks of {elements} values; convert the model again"
        )

    def _unpermute(self, values: NDArray[Number], tensor: TensorInfo, heads: int) -> NDArray[Number]:
        """Undo the interleaving: the file has rows (0, half, 1, half + 1, …) of each head; returns them in order."""
        rows, rest = tensor.shape[0], values.shape[1:]
        if heads <= 0 or rows % (2 * heads):
            raise BadWeights(f"{self.path}: {rows} rows of q or k do not divide into {heads} heads")
        pairs = values.reshape(-1, rows // heads // 2, 2, *rest)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _block_sizes(tensor: TensorInfo, path: Path) -> tuple[int, int]:
    import gguf

    try:
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_code)]
    except (KeyError, ValueError):
        raise UnsupportedModel(f"{path}: tensor {tensor.name} has unknown type {tensor.type_code}") from None
    return int(sizes[0]), int(sizes[1])


def _dequantizer(tensor: TensorInfo, path: Path) -> Callable[[NDArray[np.uint8]], Floats]:
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.type_code)

    def to_floats(piece: NDArray[np.uint8]) -> Floats:
        try:
            values: Floats = gguf.dequantize(piece, kind)
        except NotImplementedError:
            raise UnsupportedModel(f"{path}: tensor {tensor.name} has type {kind.name}; quantize it as Q8_0") from None
        return values

    return to_floats
