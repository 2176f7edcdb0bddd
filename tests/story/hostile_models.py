"""Whole models of which one file is hostile: those that once gave a traceback or hung, by name."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.files.hostile import ARRAY, STRING, U32, edit
from tests.files.test_hostile_weights import made
from tests.text.test_hostile_tokenizer import PANICS


def _config(**change: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        edit(folder / "config.json", change)
        return folder

    return make


def _gguf(**change: tuple[int, Any]) -> Callable[[Path], Path]:
    return lambda folder: made(folder / "model.gguf", {key.replace("__", "."): pair for key, pair in change.items()})


def _panic(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        edit(folder / "tokenizer.json", PANICS[name])
        return folder

    return make


def _fifo(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        return folder

    return make


def _two_lines(folder: Path) -> Path:
    """A name that would take several lines and clear the terminal."""
    path = folder / "a\nb\x1b[2J"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": "x\ny"}))
    return path


HOSTILE: dict[str, Callable[[Path], Path]] = {
    "layers 1e9": _config(num_hidden_layers=10**9),
    "layers 1e6": _config(num_hidden_layers=10**6),
    "vocabulary 2**63": _config(vocab_size=2**63),
    "vocabulary as text": _config(vocab_size="many"),
    "eos as text": _config(eos_token_id="a"),
    "hidden size 2**31": _config(hidden_size=2**31),
    "split count as text": _gguf(split__count=(STRING, "two")),
    "expert count as text": _gguf(llama__expert_count=(STRING, "two")),
    "freq base as text": _gguf(llama__rope__freq_base=(STRING, "two")),
    "block count 2**32-1": _gguf(llama__block_count=(U32, 2**32 - 1)),
    "tokens as numbers": _gguf(tokenizer__ggml__tokens=(ARRAY, (U32, [1, 2]))),
    "panic of a regex": _panic("regex of the splitter"),
    "panic while loading": _panic("map of characters"),
    "fifo as weights": _fifo("model.safetensors"),
    "fifo as tokenizer": _fifo("tokenizer.json"),
    "two lines": _two_lines,
}
