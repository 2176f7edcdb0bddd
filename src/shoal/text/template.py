"""The chat template: messages in, prompt text out, rendered in a sandbox because the template comes with the model.

Owns the jinja2 environment, the check of messages and a template's file. Does not know token ids or models. The sandbox
limits what a template can reach, not what it can use up: a server renders in a process of its own (worker.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.optimizer import optimize
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.errors import BadChat, BadConfig, ModelError
from shoal.files.reading import read_text

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
UNCOMPILABLE = (TemplateError, RecursionError, ValueError, MemoryError)  # the last three: nested too deep
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")


class OutputTooLong(Exception):
    """The rendered text has more characters than allowed."""


class ChatTemplate:
    """A template, compiled when it is first used. `rewrite` is applied to every text that the template itself writes.

    >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hi"}], {"eos_token": "</s>"})
    'user: Hi</s>'
    """

    def __init__(self, source: str, rewrite: Callable[[str], str] | None = None) -> None:
        self.source = source
        self._rewrite = rewrite

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The prompt text; every failure is a BadChat with its reason."""
        return self.render_checked(check_messages(messages), variables)

    def render_checked(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any], most_characters: int | None = None
    ) -> str:
        """The same for messages from check_messages(). Raises OutputTooLong where there is a limit."""
        try:
            pieces: list[str] = []
            size = 0
            for piece in self.compiled.generate({**variables, "messages": messages}):
                pieces.append(piece)
                size += len(piece)
                if most_characters is not None and size > most_characters:
                    raise OutputTooLong
            return "".join(pieces)
        except (BadChat, OutputTooLong, MemoryError):
            raise
        except TemplateError as error:  # raised by the template itself, or by the sandbox
            raise BadChat(
                f"the messages do not fit the model's chat template: {error}; change their roles or order"
            ) from error
        except Exception as error:  # a template may raise anything; the message may reveal internals
            raise BadChat(
                f"the messages do not fit the model's chat template ({type(error).__name__}); change roles or order"
            ) from error

    @cached_property
    def compiled(self) -> Template:
        tree = self._tree
        if self._rewrite is not None:
            for data in tree.find_all(nodes.TemplateData):
                data.data = self._rewrite(data.data)
            for constant in tree.find_all(nodes.Const):
                if isinstance(constant.value, str):
                    constant.value = self._rewrite(constant.value)
        try:
            return _environment().from_string(tree)
        except UNCOMPILABLE as error:
            raise _broken(error) from error

    @property
    def literals(self) -> set[str]:
        """Every text that the template itself may write."""
        tree = self._tree
        constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return constants | {node.data for node in tree.find_all(nodes.TemplateData)}

    @property
    def _tree(self) -> nodes.Template:
        environment = _environment()
        return optimize(_parsed(self.source, environment), environment)  # type: ignore[return-value]


def check_template(source: str) -> None:
    """Raise BadChat for a template that cannot be compiled. Evaluates nothing of it, as jinja2's own compiler would."""
    environment = _environment()
    waiting: list[nodes.Node] = [_parsed(source, environment)]
    while waiting:
        node = waiting.pop()
        for kind, known in ((nodes.Filter, environment.filters), (nodes.Test, environment.tests)):
            if isinstance(node, kind) and node.name not in known:
                raise _broken(f"no {kind.__name__.lower()} named {node.name!r}")
        if not isinstance(node, nodes.If | nodes.CondExpr):  # jinja2 lets a template test what is known
            waiting += node.iter_child_nodes()


def _parsed(source: str, environment: ImmutableSandboxedEnvironment) -> nodes.Template:
    try:
        return environment.parse(source)
    except UNCOMPILABLE as error:
        raise _broken(error) from error


def _broken(why: object) -> BadChat:
    return BadChat(f"the chat template is broken: {why}; supply another with --chat-template")


def read_template(path: str | None) -> str | None:
    """The text of a template in a file; None for None: the model's own is used."""
    if path is None:
        return None
    try:
        return read_text(Path(path))
    except ModelError as error:
        raise BadConfig(f"the chat template of --chat-template: {error}") from error


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with their text parts joined; refuses what a template could silently mishandle."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise BadChat(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise BadChat("messages is empty; give at least one message with a role and a content")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadChat(f"{where} must be an object with role and content, got {type(message).__name__}")
    for key in message:
        if key not in _MESSAGE_KEYS:
            raise BadChat(f"{where} has unknown key {key!r}; known: {', '.join(_MESSAGE_KEYS)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadChat(f"{where}.role must be a name such as user, got {role!r}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": None}
    return {**message, "content": _text_of(content, f"{where}.content")}


def _text_of(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise BadChat(f"{where} must be text or a list of text parts, got {type(content).__name__}")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise BadChat(f"{where}[{i}] has type {kind!r}; only parts of type 'text' are supported")
        if not isinstance(part.get("text"), str):
            raise BadChat(f"{where}[{i}].text must be text, got {type(part.get('text')).__name__}")
        texts.append(part["text"])
    return "\n".join(texts)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    del environment.globals["lipsum"]  # random filler text, without a limit
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML; templates expect plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
