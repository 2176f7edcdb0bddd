"""Small GGUF files made for tests. Owns the writing side; the code under test owns the reading side."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED, VOCAB = 256, 4, 2, 2, 512, 64
HEAD_DIM = HIDDEN // HEADS
Q = gguf.GGMLQuantizationType

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def hf_shapes(arch: str, tied: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        shapes |= {f"{at}.{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (heads * HEAD_DIM, HIDDEN)
            if arch == "qwen2":
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (heads * HEAD_DIM,)
        if arch == "qwen3":
            shapes |= {f"{at}.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes |= {f"{at}.mlp.{name}_proj.weight": (FEED, HIDDEN) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, FEED)
    return shapes


def hf_weights(arch: str, tied: bool = False, extra: dict[str, tuple[int, ...]] | None = None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = hf_shapes(arch, tied) | (extra or {})
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(hf_name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = hf_name.rsplit(".", 1)
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row by row, as a llama GGUF stores q and k: (0, half, 1, half + 1, …) of every head."""
    size = rows.shape[0] // heads
    order = [h * size + i + part * size // 2 for h in range(heads) for i in range(size // 2) for part in (0, 1)]
    return rows[order]


def quantized(values: np.ndarray, kind: Any) -> np.ndarray:
    """As blocks. The package cannot round to Q4_K: there, any numbers do."""
    if kind != Q.Q4_K:
        return gguf.quantize(values, kind)
    blocks = np.random.default_rng(values.size).integers(256, size=(*values.shape[:-1], values.shape[-1] // 256, 144))
    halves = (np.random.default_rng(1).random((*blocks.shape[:-1], 2)) / 256).astype(np.float16)
    made = blocks.astype(np.uint8)
    made[..., :4] = halves.view(np.uint8)
    return made.reshape(*values.shape[:-1], -1)


def write(path: Path, arch: str, weights: dict[str, np.ndarray], kind: Any = Q.F32, **more: Any) -> Path:
    """Write weights given in Hugging Face names and order; two-dimensional ones in the given quantization, or, by their
    names, in those of `kinds`."""
    kinds = more.pop("kinds", {})
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500000.0)
    for key, value in more.pop("metadata", {}).items():
        writer.add_key_value(key, *value)
    for name, values in more.pop("raw", {}).items():
        writer.add_tensor(name, values)
    assert not more, more
    for hf_name, given in weights.items():
        values = given
        if arch == "llama" and (".q_proj." in hf_name or ".k_proj." in hf_name):
            values = interleave(values, HEADS if ".q_proj." in hf_name else KV_HEADS)
        this = kinds.get(hf_name, kind)
        if values.ndim == 2 and this != Q.F32:
            writer.add_tensor(gguf_name(hf_name), quantized(values, this), raw_dtype=this)
        else:
            writer.add_tensor(gguf_name(hf_name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
