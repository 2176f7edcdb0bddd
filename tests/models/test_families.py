"""Every family against transformers: tiny random models, saved, read back, run in ragged chunked passes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shoal import kernels
from shoal.kernels import Ops
from shoal.models import make_model, spec_from_config
from shoal.models.rope import RopeTable
from shoal.runner.loader import SafetensorsReader, load_weights
from tests.kernels.ragged import Tables

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "num_hidden_layers": 3}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


ROPES = {
    "default": rope("default"),
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "linear": rope("linear", factor=4.0),
    "llama3": rope("llama3", **LLAMA3),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=128),
    "yarn-untruncated": rope("yarn", factor=8.0, original_max_position_embeddings=128, truncate=False, beta_fast=16.0),
    "yarn-mscale": rope("yarn", factor=4.0, original_max_position_embeddings=128, mscale=0.7, mscale_all_dim=1.3),
    "yarn-factor": rope("yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=1.21),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-llama3": ("Llama", {**ROPES["llama3"], "num_key_value_heads": 1}),
    "llama-linear": ("Llama", ROPES["linear"]),
    "llama-yarn": ("Llama", ROPES["yarn"]),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 33}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2-window": ("Qwen2", QWEN_WINDOW),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-biases-yarn": ("Qwen3", {"head_dim": 48, "attention_bias": True, **ROPES["yarn-mscale"]}),
}
LENGTHS = [1, 2, 17, 64, 230, 700]


def saved(name: str, folder: Path, **more: Any) -> Any:
    """A transformers model with lively weights, also written to the folder; more: of its config."""
    family, changes = MODELS[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes, **more}, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.5 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def passes(rng: random.Random, lengths: list[int]) -> list[list[tuple[int, int, int]]]:
    """Cut the prompts into random chunks; each pass takes some sequences, in random order, until all are done."""
    done = [0] * len(lengths)
    found = []
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        waiting = [s for s, length in enumerate(lengths) if done[s] < length]
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        pieces = []
        for sequence in chosen:
            new = min(rng.choice([1, 5, 40, 300]), lengths[sequence] - done[sequence])
            pieces.append((sequence, done[sequence], new))
            done[sequence] += new
        found.append(pieces)
    return found


@torch.inference_mode()
def ragged_logits(folder: Path, ops: Ops, prompts: list[torch.Tensor], seed: int, block_size: int) -> Any:
    spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    model = make_model(spec, load_weights(SafetensorsReader(folder), spec, torch.float32, "cpu"), ops)
    lengths = [len(prompt) for prompt in prompts]
    tables = Tables(lengths, block_size, seed)
    shape = (tables.blocks, block_size, spec.kv_heads, spec.head_dim)
    kv = [(torch.full(shape, 9.0), torch.full(shape, 9.0)) for _ in range(spec.layers)]
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    for pieces in passes(random.Random(seed), lengths):
        batch = tables.batch(pieces)
        ids = torch.cat([prompts[sequence][before : before + new] for sequence, before, new in pieces])
        logits = model.logits(model.forward(ids, batch, kv))
        assert logits.dtype == torch.float32
        for (sequence, _, _), part in zip(pieces, logits.split([new for _, _, new in pieces]), strict=True):
            parts[sequence].append(part)
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    prompts = [torch.randint(0, SIZES["vocab_size"], (length,)) for length in LENGTHS]
    with torch.inference_mode():
        wanted = [model(prompt[None]).logits[0] for prompt in prompts]
    for index, (_, ops) in enumerate(kernels.available()):
        found = ragged_logits(tmp_path, ops, prompts, seed=index, block_size=16)
        for mine, theirs in zip(found, wanted, strict=True):
            assert (mine - theirs).abs().max() < 1e-4
        assert theirs.std() > 0.1, "logits too flat to tell models apart"


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [32, 80, 128])
def test_rope_tables_equal_transformers(name: str, head_dim: int) -> None:
    config = transformers.LlamaConfig(**{**SIZES, **ROPES[name], "head_dim": head_dim})
    spec = spec_from_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    positions = torch.tensor([0, 1, 127, 128, 1000, 9000])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    table = RopeTable(spec.rope, head_dim, torch.device("cpu"))
    found_cos, found_sin = table.rows(positions, 9001)
    half = head_dim // 2
    # a 1e-7 difference in a frequency is 1e-3 radians at position 9000
    near = slice(0, 5)
    torch.testing.assert_close(found_cos[near], cos[0, near, :half], atol=2e-4, rtol=0)
    torch.testing.assert_close(found_sin[near], sin[0, near, :half], atol=2e-4, rtol=0)
    torch.testing.assert_close(found_cos, cos[0, :, :half], atol=2e-3, rtol=0)
    torch.testing.assert_close(found_sin, sin[0, :, :half], atol=2e-3, rtol=0)


def test_rope_table_grows_without_changing() -> None:
    spec = spec_from_config({**transformers.LlamaConfig(**SIZES).to_dict(), "architectures": ["LlamaForCausalLM"]})
    table = RopeTable(spec.rope, 16, torch.device("cpu"))
    before = table.rows(torch.tensor([3, 4000]), 4001)
    assert len(table.cos) == 4096
    table.reserve(5000)
    assert len(table.cos) == 8192
    after = table.rows(torch.tensor([3, 4000]), 4001)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
