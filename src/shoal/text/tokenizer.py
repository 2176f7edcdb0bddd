"""Tokenizer: text and chats to token ids and back.

Owns the meaning of special tokens and the loading from a model's files. Does not know requests, models or torch.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from shoal.errors import BadChat, BadRequest, ModelError, TokenizerMismatch, UnsupportedModel
from shoal.files.gguf import GgufFile
from shoal.files.source import ModelFiles, eos_ids, read_json
from shoal.text.chat import ChatRenderer, Rendered
from shoal.text.gguf_vocab import backend_from_gguf, bos_by_default
from shoal.text.hiding import hiding, special_tokens
from shoal.text.pieces import Pieces
from shoal.text.special import SecretNames
from shoal.text.template import Message, check_template

LONG = 4096  # characters or ids; from here on, backend calls that release the interpreter lock are used
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A tokenizer and its chat template.

    `adds_bos` says whether encode() puts the BOS token in front; None leaves that to the backend. With
    `special_in_messages`, messages can write special tokens; without it, what looks like one there is text.

    >>> from tokenizers import Tokenizer as Backend, models
    >>> tokenizer = Tokenizer(Backend(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])))
    >>> tokenizer.encode("abb"), tokenizer.decode([2])
    ([2, 1], 'ab')
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
        adds_bos: bool | None = None,
        special_in_messages: bool = False,
    ) -> None:
        self.backend = backend
        self.special = dict(special or {})
        self.names = None if special_in_messages else SecretNames(special_tokens(backend))
        self.bos_id: int | None = self._id_of("bos_token")
        own_eos = self._id_of("eos_token")
        self.eos_ids = tuple(sorted({*eos_ids, *([] if own_eos is None else [own_eos])}))
        self._renderer = None if chat_template is None else ChatRenderer(chat_template, self.special, self.names)
        self._adds_bos = adds_bos

    @cached_property
    def vocab_size(self) -> int:
        """The highest token id plus one."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def pieces(self) -> Pieces:
        """What single ids stand for, for the detokenizer."""
        return Pieces(self.backend)

    @property
    def has_chat_template(self) -> bool:
        return self._renderer is not None

    @property
    def renderer(self) -> ChatRenderer:
        """What makes the text of a prompt from messages; raises BadChat where there is no template."""
        if self._renderer is None:
            raise BadChat(
                "the model has no chat template; send a plain prompt, or supply a template "
                "(--chat-template, or chat_template.jinja in the model's folder)"
            )
        return self._renderer

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text. It never begins with two BOS tokens, even when the text itself begins with one."""
        ids = _encoded(self.backend, text, add_special)
        if self.bos_id is None:
            return ids
        begins = len(ids) - len(_without_first(ids, self.bos_id))
        wanted = min(begins, 1)
        if add_special and self._adds_bos is not None:
            wanted = int(self._adds_bos or text.startswith(self.special["bos_token"]))
        return [self.bos_id] * wanted + ids[begins:]

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """Token ids of a rendered chat. The template writes its own BOS, so none is added."""
        if not rendered.hidden:
            return self.encode(rendered.text, add_special=False)
        ids = _encoded(self._hiding, rendered.text, add_special=False)
        rest = ids if self.bos_id is None else _without_first(ids, self.bos_id)
        return ids[: min(1, len(ids) - len(rest))] + rest

    def warm(self) -> None:
        """Make now what the first message with the text of a special token would need."""
        if self.names is not None and self.has_chat_template:
            _ = self._hiding

    @cached_property
    def _hiding(self) -> Backend:
        """As large as the backend itself; it takes half a second for 50,000 tokens."""
        assert self.names is not None
        return hiding(self.backend, self.names)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids; bytes that are no character become U+FFFD."""
        if len(ids) < LONG:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special)
        return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **template_vars: Any) -> str:
        """The prompt text that the chat template makes of the messages, with special tokens as it writes them."""
        return self.renderer.text(messages, add_generation_prompt, template_vars)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **template_vars: Any) -> list[int]:
        """Token ids of a chat."""
        return self.encode_rendered(self.renderer.render(messages, add_generation_prompt, template_vars))

    def _id_of(self, name: str) -> int | None:
        token = self.special.get(name)
        return None if token is None else self.backend.token_to_id(token)


def load_tokenizer(
    files: ModelFiles, chat_template: str | None = None, special_in_messages: bool = False
) -> Tokenizer | None:
    """The tokenizer of a model; None when it has none and only token ids can be used.

    `chat_template` is the text of a template that replaces the model's own.
    """
    if chat_template is not None:
        try:
            check_template(chat_template)
        except BadChat as error:
            raise ModelError(str(error)) from error
    load = _from_gguf if files.kind == "gguf" else _from_folder
    return load(files, chat_template, special_in_messages)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer with ids the model does not have; a model with spare (padding) ids is fine."""
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerMismatch(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1} but the model's vocabulary has {vocab_size} "
            "entries; use the tokenizer that belongs to this model"
        )


def _encoded(backend: Backend, text: str, add_special: bool) -> list[int]:
    try:
        if len(text) < LONG:
            return backend.encode(text, add_special_tokens=add_special).ids
        return backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
    except (TypeError, UnicodeEncodeError) as error:
        raise BadRequest(f"the text cannot be encoded: {error}; send valid Unicode without lone surrogates") from error


def _without_first(ids: list[int], token_id: int) -> list[int]:
    n = 0
    while n < len(ids) and ids[n] == token_id:
        n += 1
    return ids[n:]


def _from_gguf(files: ModelFiles, chat_template: str | None, special_in_messages: bool) -> Tokenizer | None:
    metadata = GgufFile(files.path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        return None
    special: dict[str, str] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    return Tokenizer(
        backend_from_gguf(metadata, files.path),
        special=special,
        eos_ids=eos_ids(files),
        chat_template=chat_template or metadata.get("tokenizer.chat_template"),
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", bos_by_default(metadata))),
        special_in_messages=special_in_messages,
    )


def _from_folder(files: ModelFiles, chat_template: str | None, special_in_messages: bool) -> Tokenizer | None:
    if not (files.path / "tokenizer.json").is_file():
        for name in ("tokenizer.model", "vocab.json"):
            if (files.path / name).is_file():
                raise UnsupportedModel(
                    f"{files.path} has {name} but no tokenizer.json; make one with "
                    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers"
                )
        return None
    config = _read_if_there(files.path / "tokenizer_config.json")
    named = {**_read_if_there(files.path / "special_tokens_map.json"), **(config or {})}
    backend = _read_backend(files.path / "tokenizer.json")
    special = _special_tokens(named)
    if not named:  # nothing names the special tokens: use the BOS id of the model's config
        bos = files.config.get("bos_token_id")
        token = backend.id_to_token(bos) if isinstance(bos, int) else None
        special = {} if token is None else {"bos_token": token}
    flag = named.get("add_bos_token")
    return Tokenizer(
        backend,
        special=special,
        eos_ids=eos_ids(files),
        chat_template=chat_template or _folder_template(files.path, named),
        adds_bos=flag if isinstance(flag, bool) else None,
        special_in_messages=special_in_messages,
    )


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_backend(path: Path) -> Backend:
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"cannot read {path}: {error}; download it again") from error
    # Some files keep these from training; a prompt must never be truncated or padded silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_tokens(named: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; each is written as a string or as {"content": string, …}."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = named.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _folder_template(folder: Path, named: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {file}: {error}; download it again") from error
    given = named.get("chat_template")
    if isinstance(given, list):
        by_name = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, Mapping)}
        given = by_name.get("default") or (next(iter(by_name.values())) if len(by_name) == 1 else None)
    return given if isinstance(given, str) else None
