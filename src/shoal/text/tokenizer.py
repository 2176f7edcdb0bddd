"""Tokenizer: text and chats to token ids and back.

Owns the meaning of special tokens and the loading from a model's files. Does not know requests, models or torch.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from shoal.errors import BadChat, BadRequest, ModelError, RequestFailed, TokenizerMismatch, UnsupportedModel, shown
from shoal.files.gguf import GgufFile
from shoal.files.reading import has_file, is_integer, read_json_if_there, read_text
from shoal.files.source import ModelFiles, eos_ids
from shoal.text.chat import ChatRenderer, Rendered
from shoal.text.gguf_vocab import backend_from_gguf, bos_by_default
from shoal.text.hiding import hiding, special_tokens
from shoal.text.panics import reason_of, silenced, within
from shoal.text.pieces import Pieces
from shoal.text.special import SecretNames
from shoal.text.template import Message, check_template

LONG = 4096  # characters or ids; from here on, backend calls that release the interpreter lock are used
TRIAL = "The 3 quick foxes' (été, 日本) \n\n\tjump: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"  # of most kinds of characters
TRIAL_S = 10.0
MOST_BYTES = 512 * 2**20  # of a tokenizer.json; large vocabularies take some 30 MB
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

    @cached_property
    def marks(self) -> dict[str, int]:
        """The added tokens that a grammar never matches as text (llguidance's rule), and their ids."""
        added = self.backend.get_added_tokens_decoder().items()
        return {
            token.content: id
            for id, token in added
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

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

    def end_of(self, rendered: Rendered, characters: int) -> str:
        """The end of a rendered chat, with special tokens as the template writes them."""
        if not rendered.hidden or self.names is None:
            return rendered.text[-characters:]
        return self.names.reveal(rendered.text[-characters:])[0]

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
        try:
            if len(ids) < LONG:
                return self.backend.decode(list(ids), skip_special_tokens=skip_special)
            return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]
        except BaseException as error:
            reason = reason_of(error)
            if reason is None or isinstance(error, TypeError | OverflowError):
                raise
            raise RequestFailed(f"the model's tokenizer failed to decode {len(ids)} tokens: {reason}") from error

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token, as far as they do not depend on those around it."""
        if self.pieces.is_byte_level:
            return self.pieces.bytes_of(token_id)
        return self.decode([token_id], skip_special=False).encode()

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
    tokenizer = load(files, chat_template, special_in_messages)
    if tokenizer is not None:
        _try_out(tokenizer.backend, files.path)
    return tokenizer


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
    except BaseException as error:
        reason = reason_of(error)
        if reason is None:
            raise
        raise BadRequest(f"the model's tokenizer failed on this text: {reason}; send another text") from error


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
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(
            f"{files.path}: tokenizer.chat_template is {shown(template)}; a text is needed: convert the model again"
        )
    backend = backend_from_gguf(metadata, files.path)
    special: dict[str, str] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if is_integer(token_id) and 0 <= token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    return Tokenizer(
        backend,
        special=special,
        eos_ids=eos_ids(files),
        chat_template=chat_template or template,
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", bos_by_default(metadata))),
        special_in_messages=special_in_messages,
    )


def _from_folder(files: ModelFiles, chat_template: str | None, special_in_messages: bool) -> Tokenizer | None:
    if not has_file(files.path / "tokenizer.json"):
        for name in ("tokenizer.model", "vocab.json"):
            if has_file(files.path / name):
                raise UnsupportedModel(
                    f"{files.path} has {name} but no tokenizer.json; make one with "
                    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers"
                )
        return None
    config = read_json_if_there(files.path / "tokenizer_config.json")
    named = {**read_json_if_there(files.path / "special_tokens_map.json"), **config}
    backend = _read_backend(files.path / "tokenizer.json")
    special = _special_tokens(named)
    if not named:  # nothing names the special tokens: use the BOS id of the model's config
        bos = files.config.get("bos_token_id")
        token = backend.id_to_token(bos) if is_integer(bos) and 0 <= bos < 2**32 else None
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


def _read_backend(path: Path) -> Backend:
    text = read_text(path, MOST_BYTES)
    try:
        with silenced():
            backend = Backend.from_str(text)
    except BaseException as error:
        reason = reason_of(error)
        if reason is None:
            raise
        raise ModelError(f"cannot read {path}: {reason}; download it again") from error
    # Some files keep these from training; a prompt must never be truncated or padded silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _try_out(backend: Backend, path: Path) -> None:
    """Encode and decode one line: a tokenizer that panics or never ends is refused when it is loaded.

    One that has no token for some of the characters is not: texts without them can be encoded.
    """

    def work() -> None:
        (found,) = backend.encode_batch_fast([TRIAL])  # releases the interpreter lock, so that the time-out can pass
        backend.decode_batch([found.ids])

    try:
        with silenced():
            within(TRIAL_S, work)
    except BaseException as error:
        reason = reason_of(error)
        if reason is None:
            raise
        if isinstance(error, Exception) and not isinstance(error, TimeoutError):
            return
        raise ModelError(
            f"the tokenizer of {path} fails on a line of plain text: {reason}; use the model's original files"
        ) from error


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
    if has_file(file):
        return read_text(file)
    given = named.get("chat_template")
    if isinstance(given, list):
        by_name = {str(entry.get("name")): entry.get("template") for entry in given if isinstance(entry, Mapping)}
        given = by_name.get("default") or (next(iter(by_name.values())) if len(by_name) == 1 else None)
    if given is not None and not isinstance(given, str):
        raise ModelError(f"{folder}: chat_template is {shown(given)}; a text is needed in tokenizer_config.json")
    return given
