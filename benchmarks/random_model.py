"""A model with random weights in a given shape, in the formats that the engines of cpu_peers.py read.

    python benchmarks/random_model.py --config DIR --out DIR [--gguf f32,bf16,q8_0]

Needs transformers, tokenizers and gguf. Writes a Hugging Face folder in bfloat16 (`--out`) with a byte-level tokenizer
of the vocabulary's size, and beside it one GGUF file per type, with the same weights. Default: SmolLM2-135M's
shape. Not used by Shoal itself; knows no engine.
"""

import argparse
import json
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}


def words(count: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and their merges: all bytes, then pairs and triples of bytes until there are enough."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = list(product(letters, letters))
    triples = ((one + other, third) for (one, other), third in product(pairs, letters))
    merges = list(islice(chain(pairs, triples), count - len(letters)))
    return letters + ["".join(merge) for merge in merges], merges


def save_tokenizer(tokens: list[str], merges: list[tuple[str, str]], folder: Path) -> None:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=tokens[1], eos_token=tokens[2], pad_token=tokens[0]
    ).save_pretrained(folder)


def interleaved(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a Llama's queries or keys in GGUF's rotary order: the halves of each head alternate."""
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def save_gguf(
    model: Any, tokens: list[str], merges: list[tuple[str, str]], config: dict[str, Any], path: Path, kind: str
) -> None:
    architecture, heads, layers = config["model_type"], config["num_attention_heads"], config["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = interleaved(values, heads)
        if architecture == "llama" and ".k_proj." in name:
            values = interleaved(values, config["num_key_value_heads"])
        stored = gguf.GGMLQuantizationType[kind.upper() if values.ndim > 1 else "F32"]
        new_name = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(new_name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="folder with a config.json; default: SmolLM2-135M's shape")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gguf", default="f32,bf16,q8_0", help="types of the GGUF files, separated by commas")
    args = parser.parse_args()
    config = json.loads((args.config / "config.json").read_text()) if args.config else SMOLLM2
    torch.manual_seed(0)
    described = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16)
    model.save_pretrained(args.out)
    tokens, merges = words(config["vocab_size"])
    save_tokenizer(tokens, merges, args.out)
    for kind in filter(None, args.gguf.split(",")):
        save_gguf(model, tokens, merges, config, args.out.with_name(f"{args.out.name}.{kind}.gguf"), kind)


if __name__ == "__main__":
    main()
