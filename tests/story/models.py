"""Tiny random models in Hugging Face layout, with a byte-level tokenizer trained here: whole runs in milliseconds."""

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from shoal import LLM, Completion, RequestOutput, SamplingParams

CORPUS = [
    "Once upon a time there was a little fish who swam in a shoal of a thousand fish.",
    "The quick brown fox jumps over the lazy dog; the dog sleeps and the fox laughs.",
] * 4
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
BOS, EOS, USER, ASSISTANT, END = range(5)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "initializer_range": 0.15,  # enough for logits that are neither flat nor a spike
    "tie_word_embeddings": False,
}
BLOCK = 16
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # key and value, layers, heads, head size, float32


@cache
def backend(vocab: int = 300) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    backend().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_model(folder: Path, seed: int = 0, template: str | None = TEMPLATE, **sizes: Any) -> Path:
    """A model and its tokenizer; generation_config.json says only which token ends."""
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).save_pretrained(folder)
    save_tokenizer(folder, template)
    generation(folder, eos_token_id=EOS)
    return folder


def generation(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def copy(model: Path, to: Path) -> Path:
    shutil.copytree(model, to)
    return to


def open_llm(folder: Path, **options: Any) -> LLM:
    """With memory for far more than tests ask for, yet little: check=True goes through all blocks after each pass."""
    return LLM(str(folder), **{"kv_memory": "8MiB", "dtype": "float32", "threads": 1, "depth": 2, **options})


def small_kv(blocks: int) -> int:
    """kv_memory that holds about so many blocks."""
    return blocks * BLOCK * KV_BYTES_PER_TOKEN


def reference(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **more})


def seeded(seed: int, max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": max_tokens, "ignore_eos": True, **more})


def first(outputs: Sequence[RequestOutput]) -> Completion:
    return outputs[0].outputs[0]


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The tokens of every answer to every prompt."""
    return [one.token_ids for output in outputs for one in output.outputs]
