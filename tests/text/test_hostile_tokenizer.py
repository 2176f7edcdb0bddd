"""Tokenizer files that make the library fail or panic: refused when they are loaded, or an error of one request."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from shoal.errors import BadChat, BadRequest, ModelError, RequestFailed
from shoal.files.source import find_model
from shoal.text import tokenizer as module
from shoal.text.template import ChatTemplate, read_template
from shoal.text.tokenizer import Tokenizer, load_tokenizer
from tests.files.hostile import ABSURD, said_by
from tests.story.models import backend, save_tokenizer

ENDLESS = "(a+)+$"  # a panic of the library after ten million steps
PANICS: dict[str, dict[str, Any]] = {
    "regex of the splitter": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": ENDLESS}, "behavior": "Isolated",
                                                "invert": False}},
    "regex of the normalizer": {"normalizer": {"type": "Replace", "pattern": {"Regex": ENDLESS}, "content": "x"}},
    "nothing to replace": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    "map of characters": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "template without its token": {"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
                                                      "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]}},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 320}))
    return tmp_path


def good() -> dict[str, Any]:
    state: dict[str, Any] = json.loads(backend().to_str())
    return state


def said_of(folder: Path, state: Any) -> str:
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return said_by(lambda: load_tokenizer(find_model(str(folder))))


@pytest.mark.parametrize("name", PANICS)
def test_a_panic_is_an_error_and_prints_nothing(folder: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    said = said_of(folder, good() | PANICS[name])
    assert str(folder) in said
    assert said.endswith(("download it again", "use the model's original files"))
    assert capfd.readouterr().err == ""


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value; of long lists and objects only the first entries."""
    if path:
        yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries)[:5]:
        yield from paths_of(inner, (*path, key))


def test_every_place_of_a_tokenizer_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is loaded, or refused with a ModelError; what is loaded encodes, or refuses the text."""
    values = [ABSURD[name] for name in ("text", "list", "object", "true", "null", "fraction", "-1", "2**32-1", "2**64")]
    state = good() | {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"}}
    for path in paths_of(state):
        for value in values:
            changed = copy.deepcopy(state)
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            said_of(folder, changed)
    assert "panicked" not in capfd.readouterr().err


def test_files_that_are_cut(folder: Path) -> None:
    whole = (folder / "tokenizer.json").read_bytes()
    for size in range(0, len(whole), len(whole) // 40):
        (folder / "tokenizer.json").write_bytes(whole[:size])
        assert "tokenizer.json" in said_by(lambda: load_tokenizer(find_model(str(folder))))


def test_a_tokenizer_that_never_ends_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million characters before every text take half a minute; no limit here is short enough to fail a good one."""
    monkeypatch.setattr(module, "TRIAL_S", 0.2)
    said = said_of(folder, good() | {"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}})
    assert "it takes more than 0.2 s" in said


def panicking() -> Tokenizer:
    return Tokenizer(Backend.from_str(json.dumps(good() | PANICS["regex of the splitter"])))


def test_a_panic_at_a_later_text_is_that_requests_own() -> None:
    tokenizer = panicking()
    ids = tokenizer.encode("b")
    for text in ("a" * 40 + "!", "a" * 40 + "!" * module.LONG):
        with pytest.raises(BadRequest, match="tokenizer failed on this text: Onig"):
            tokenizer.encode(text)
    assert tokenizer.encode("b") == ids


def test_a_text_without_tokens_is_refused_alone() -> None:
    """The library raises a bare Exception for these."""
    state = good() | {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}, "pre_tokenizer": None}
    tokenizer = Tokenizer(Backend.from_str(json.dumps(state | {"post_processor": None, "added_tokens": []})))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(BadRequest, match="unknown token"):
        tokenizer.encode("b")


def test_a_panic_while_decoding_is_an_error_of_the_request() -> None:
    decoder = {"type": "Replace", "pattern": {"Regex": ENDLESS}, "content": "x"}
    tokenizer = Tokenizer(Backend.from_str(json.dumps(good() | {"decoder": decoder})))
    ids = tokenizer.encode("a" * 40 + "!", add_special=False)
    if len(ids) > 1:  # the decoder sees single tokens
        state = good() | {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, decoder]}}
        tokenizer = Tokenizer(Backend.from_str(json.dumps(state)))
    with pytest.raises(RequestFailed, match="Onig"):
        tokenizer.decode(ids)


def test_templates_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    deep = "{% if a %}" * 5000
    with pytest.raises(BadChat, match="broken"):
        _ = ChatTemplate(deep).compiled
    with pytest.raises(ModelError, match="broken"):
        load_tokenizer(find_model(str(folder)), deep)
    for name in ("fifo", "binary"):
        path = tmp_path / name
        if name == "fifo":
            import os

            os.mkfifo(path)
        else:
            path.write_bytes(b"\xff\xfe\x00")
        assert name in said_by(lambda path=path: read_template(str(path)))  # type: ignore[misc]
