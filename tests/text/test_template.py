"""Chat templates: what they may do, what they may not, and which messages are refused with which words."""

import doctest
from typing import Any

import pytest

from shoal.errors import BadChat
from shoal.text import template
from shoal.text.template import ChatTemplate

HI = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Any = HI, **variables: Any) -> str:
    return ChatTemplate(source).render(messages, variables)


def test_examples() -> None:
    assert doctest.testmod(template).failed == 0


def test_blocks_leave_no_blank_lines_and_loops_can_be_left() -> None:
    source = (
        "{% for m in messages %}\n  {% if m.role == 'x' %}\n{% break %}\n  {% endif %}\n{{ m.content }}\n{% endfor %}"
    )
    assert render(source, [*HI, {"role": "x", "content": "no"}, *HI]) == "Hi\n"


def test_tojson_is_plain_json() -> None:
    assert render("{{ x | tojson }}", x={"b": "<é>", "a": 1}) == '{"b": "<é>", "a": 1}'
    assert render("{{ x | tojson(indent=2, sort_keys=true) }}", x={"b": 1, "a": 2}) == '{\n  "a": 2,\n  "b": 1\n}'


def test_generation_block_and_date() -> None:
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hi"
    assert int(render("{{ strftime_now('%Y') }}")) >= 2024


def test_raise_exception_reaches_the_caller() -> None:
    with pytest.raises(BadChat, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ 1 // 0 }}",
        "{{ none + 'x' }}",
        "{{ nothing.attribute }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(BadChat):
        render(source)


@pytest.mark.parametrize(
    "source",
    ["{{ messages.__class__ }}", "{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}"],
)
def test_inner_attributes_show_nothing(source: str) -> None:
    assert render(source) == ""


def test_broken_template_says_so() -> None:
    with pytest.raises(BadChat, match=r"template is broken.*--chat-template"):
        render("{% if %}")


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ("Hi", "list of messages"),
        ({"role": "user"}, "list of messages"),
        (["Hi"], r"messages\[0\] must be an object"),
        ([{"content": "Hi"}], r"messages\[0\]\.role"),
        ([{"role": 3, "content": "Hi"}], r"messages\[0\]\.role"),
        ([*HI, {"role": "user"}], r"messages\[1\]\.content must be text .* NoneType"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content .* int"),
        ([{"role": "user", "content": {"text": "Hi"}}], r"messages\[0\]\.content .* dict"),
        (
            [{"role": "user", "content": [{"type": "image_url", "url": "x"}]}],
            r"content\[0\] has type 'image_url'",
        ),
        ([{"role": "user", "content": ["Hi"]}], r"content\[0\] has type 'str'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text .* NoneType"),
        ([{"role": "user", "content": "Hi", "colour": "red"}], r"unknown key 'colour'; known: role"),
    ],
)
def test_messages_that_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(BadChat, match=words):
        render("{{ messages }}", messages)


def test_tool_calls_need_no_content() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert render("{{ messages[0].tool_calls[0].function.name }}", [call]) == "f"
