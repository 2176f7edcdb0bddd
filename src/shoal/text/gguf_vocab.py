"""A tokenizer built from the vocabulary inside a GGUF file.

Owns the two kinds such a file may hold: byte-level BPE ("gpt2") and sentencepiece BPE ("llama"). Does not know chat.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from shoal.errors import ModelError, UnsupportedModel, shown
from shoal.text.panics import reason_of, silenced

MOST_PIECE_WORK = 10**9  # characters compared to find the merges of a sentencepiece vocabulary; real ones need 10**8
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Split(NamedTuple):
    """How text is split before merging. `pattern` None is GPT-2's own."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words_first: bool = False
    adds_bos: bool = False


_SPLITS = {
    "gpt-2": _Split(),
    "default": _Split(),
    "smollm": _Split(single_digits=True),
    "starcoder": _Split(single_digits=True),
    "refact": _Split(single_digits=True),
    "llama-bpe": _Split(_LLAMA3, whole_words_first=True, adds_bos=True),
    "llama3": _Split(_LLAMA3, whole_words_first=True, adds_bos=True),
    "llama-v3": _Split(_LLAMA3, whole_words_first=True, adds_bos=True),
    "smaug-bpe": _Split(_LLAMA3),
    "dbrx": _Split(_LLAMA3),
    "qwen2": _Split(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Split(_QWEN2, nfc=True),
    "tekken": _Split(_TEKKEN, whole_words_first=True, adds_bos=True),
}


def backend_from_gguf(metadata: Mapping[str, Any], path: Path) -> Backend:
    """Build the tokenizer that the file's `tokenizer.ggml.*` keys describe."""
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(kind, str) or kind not in builders:
        raise UnsupportedModel(
            f"{path} has a tokenizer of kind {shown(kind)}; known in GGUF files: {', '.join(builders)}"
        )
    tokens: list[str] = _list(metadata, "tokens", str, path)
    types: list[int] = _list(metadata, "token_type", int, path) or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{path} has {len(tokens)} tokens but {len(types)} token types; convert the model again")
    try:
        with silenced():
            return _with_added(builders[kind](metadata, tokens, types, path), tokens, types)
    except ModelError:
        raise
    except BaseException as error:
        reason = reason_of(error)
        if reason is None:
            raise
        raise ModelError(f"{path} holds a broken vocabulary: {reason}; convert the model again") from error


def _list(metadata: Mapping[str, Any], name: str, kind: type | UnionType, path: Path) -> list[Any]:
    """One of the lists tokenizer.ggml.*; empty where the file has none."""
    found = metadata.get(f"tokenizer.ggml.{name}") or []
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        wanted = "texts" if kind is str else "numbers"
        raise ModelError(f"{path}: tokenizer.ggml.{name} is {shown(found)}; a list of {wanted} is needed")
    return found


def _with_added(backend: Backend, tokens: Sequence[str], types: Sequence[int]) -> Backend:
    backend.add_tokens([_added(t, special=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED])
    backend.add_special_tokens(
        [_added(t, special=True) for t, k in zip(tokens, types, strict=True) if k in (_CONTROL, _UNKNOWN)]
    )
    return backend


def bos_by_default(metadata: Mapping[str, Any]) -> bool:
    """Whether a BOS token is prepended where the file does not specify it."""
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    split = _SPLITS.get(str(metadata.get("tokenizer.ggml.pre", "default")))
    return split is not None and split.adds_bos


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        ids.setdefault(token, i)
    return ids


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], path: Path) -> Backend:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in _SPLITS:
        raise UnsupportedModel(f"{path} splits text as {shown(name)} (tokenizer.ggml.pre); known: {', '.join(_SPLITS)}")
    split = _SPLITS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges", str, path)]
    if not all(len(merge) == 2 for merge in merges):
        raise ModelError(f"{path}: tokenizer.ggml.merges must hold pairs; convert the model again")
    backend = Backend(models.BPE(vocab=_ids(tokens), merges=merges, ignore_merges=split.whole_words_first))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _splitter(split)
    backend.decoder = decoders.ByteLevel()
    return backend


def _splitter(split: _Split) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    return pre_tokenizers.Sequence(steps)


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], path: Path) -> Backend:
    scores = _list(metadata, "scores", int | float, path)
    if len(scores) != len(tokens):
        raise ModelError(f"{path} needs one of tokenizer.ggml.scores for each token; convert the model again")
    if sum(len(token) ** 2 for token in tokens) > MOST_PIECE_WORK:
        raise ModelError(f"{path} holds tokens that are too long for a vocabulary of pieces; convert the model again")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_by_score(tokens, types, scores)
    backend = Backend(
        models.BPE(vocab=_ids(tokens), merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaced = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if spaced else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if spaced else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Sentencepiece joins the two neighbours whose union has the best score: every split of a piece is a merge."""
    ids = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _NORMAL}
    found = [
        (-scores[i], i, ids[piece[:at]], ids[piece[at:]])
        for piece, i in ids.items()
        for at in range(1, len(piece))
        if piece[:at] in ids and piece[at:] in ids
    ]
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(found)]
