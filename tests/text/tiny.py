"""Tokenizers trained inside the tests: one byte-level, one in the manner of sentencepiece, both with special tokens."""

import json
from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from shoal.text.tokenizer import Tokenizer

CORPUS = [
    "Once upon a time there was a little fish who swam in a shoal of a thousand fish.",
    "The stop sign says STOP; stop strings stop the stream. é ü ß ñ",
    "def double(x):\n    return x * 2\n\n\n# numbers 0 1 2 3 4 5 6 7 8 9 10 100\n",
    "a b  c   d    e , . ! ? ' \" User: Assistant: </end>",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("two words", special=False)])
    return Tokenizer(backend, special={"bos_token": "<s>", "eos_token": "</s>"})


def sentencepiece_parts() -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens in the order of their ids, merges in the order of their rank)."""
    trained = Backend(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL + BYTES, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [tuple(merge) for merge in model["merges"]]


@cache
def sentencepiece() -> Tokenizer:
    tokens, merges = sentencepiece_parts()
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return Tokenizer(backend, special={"bos_token": "<s>", "eos_token": "</s>"})


@cache
def metaspace() -> Tokenizer:
    """The other way to write a sentencepiece decoder; it knows no byte tokens."""
    other = sentencepiece()
    backend = Backend.from_str(other.backend.to_str())
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, special=other.special)


KINDS = {"byte_level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace}
