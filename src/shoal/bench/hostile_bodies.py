"""Requests made to hurt a server: large, deep, slow or never finished, but each within the limit on a body's size.

Owns the list. Knows the API's field names and nothing of how a server reads them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BODY_BYTES = 3_900_000  # just below the default of --max-body
COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
RESPONSES, BATCH = "/v1/responses", "/v1/chat/completions/batch"
SLOW_REGEX = "(a|b|ab){1,900}(c{1,900}d){1,900}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# what a chat template of a hostile model computes; the first message chooses. Not constants: jinja would compute those
# when it compiles the template
TEMPLATES = {
    "loops": LOOPS,
    "power": "{{ (8 + messages|length) ** (9 ** 9) }}",
    "lipsum": "{{ lipsum(n=1000000 * messages|length) }}",
    "padding": "{{ '%2000000000d' % messages|length }}",
}


@dataclass(frozen=True)
class Attack:
    """Requests of one kind, sent at the same time."""

    name: str
    path: str
    body: Callable[[], bytes]
    copies: int = 4
    finished: bool = True  # False: the last byte is never sent


def completion(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"prompt": "Once", **fields}).encode()


def chat(text: str, **fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}).encode()


def response(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(fields).encode()


def filled(head: str, piece: str, tail: str) -> Callable[[], bytes]:
    """As many pieces as a body can hold, with commas between them."""
    return lambda: (head + ",".join([piece] * (BODY_BYTES // (len(piece) + 1))) + tail).encode()


def letters(letter: str, head: str, tail: str) -> Callable[[], bytes]:
    return lambda: (head + letter * (BODY_BYTES // len(letter)) + tail).encode()


def attacks() -> list[Attack]:
    """All of them."""
    nested = "[" * 60 + "]" * 60
    call = '{"max_tokens":1,"messages":[{"role":"assistant","content":"","tool_calls":[{"a":['
    long = {"max_tokens": 400, "n": 128, "logprobs": 64, "ignore_eos": True}
    most = {"max_tokens": 64, "n": 128, "logprobs": 63, "ignore_eos": True}
    many_ids = [[7] * 500] * 100
    return [
        Attack("answers x logprobs", COMPLETIONS, completion(**long), 1),
        Attack("the same, streamed", COMPLETIONS, completion(**long, stream=True), 1),
        Attack("echo x logprobs", COMPLETIONS, completion(prompt=many_ids, echo=True, logprobs=64, max_tokens=1)),
        Attack("echo x logprobs, streamed", COMPLETIONS, completion(
            prompt=[[7] * 126] * 8, echo=True, logprobs=64, max_tokens=1, stream=True), 1),
        Attack("as many logprobs as are allowed", COMPLETIONS, completion(**most), 2),
        Attack("the same in a chat", CHAT, chat("x", **most | {"logprobs": True, "top_logprobs": 63}), 2),
        Attack("as many jobs as are allowed", COMPLETIONS, completion(prompt=["x"] * 1024, max_tokens=1)),
        Attack("the same, streamed with ids", COMPLETIONS, completion(
            prompt=["x"] * 1024, max_tokens=1, stream=True, return_token_ids=True)),
        Attack("stop strings x samples", COMPLETIONS, completion(
            prompt=["x"] * 8, n=128, stop=[f"{number:02}" * 512 for number in range(64)], max_tokens=1), 2),
        Attack("token ids x samples", COMPLETIONS, completion(
            prompt=[7] * 2000, n=128, max_tokens=1, return_token_ids=True)),
        *attacks_by_parameters(),
        Attack("nested tool calls", CHAT, filled(call, nested, "]}]}]}")),
        Attack("many elements in an ignored field", COMPLETIONS, filled('{"prompt":"Once","user":[', "[]", "]}")),
        Attack("many elements in the schema", CHAT, filled(
            '{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":'
            '{"name":"x","schema":{"enum":[', "{}", "]}}}}")),
        Attack("many unknown fields", COMPLETIONS, lambda: json.dumps(
            {"prompt": "Once", **{f"field{number}": 0 for number in range(200_000)}}).encode()),
        Attack("many messages", CHAT, filled('{"messages":[', '{"role":"user","content":"x"}', "]}")),
        Attack("many items", RESPONSES, filled('{"input":[', '{"role":"user","content":"x"}', "]}")),
        Attack("many turns, of which most are cut", RESPONSES, response(
            input=[{"role": "user", "content": "x"}] * 4000, truncation="auto", max_output_tokens=1)),
        Attack("text that is stored and not seen", RESPONSES, letters(
            "a", '{"max_output_tokens":1,"input":[{"role":"user","content":"x"},{"type":"reasoning","content":"',
            '"}]}'), 20),
        Attack("logprobs of a response", RESPONSES, response(
            input="x", max_output_tokens=1900, include=["message.output_text.logprobs"], top_logprobs=64), 2),
        Attack("many prompts", COMPLETIONS, filled('{"prompt":[', '"x"', "]}")),
        Attack("many stop strings", COMPLETIONS, filled('{"prompt":"Once","stop":[', '"x"', "]}")),
        Attack("many token ids", COMPLETIONS, filled('{"prompt":[', "7", "]}")),
        Attack("many biases", COMPLETIONS, lambda: json.dumps(
            {"prompt": "Once", "logit_bias": {str(number): 1 for number in range(300_000)}}).encode()),
        Attack("many choices", COMPLETIONS, filled('{"prompt":"Once","structured_outputs":{"choice":[', '"x"', "]}}")),
        Attack("one long number", COMPLETIONS, letters("9", '{"prompt":"Once","max_tokens":', "}")),
        Attack("a long fraction", COMPLETIONS, letters("9", '{"prompt":"Once","temperature":0.', "}")),
        Attack("one letter", COMPLETIONS, letters("a", '{"prompt":"', '"}'), 20),
        Attack("spaces", COMPLETIONS, letters(" ", '{"prompt":"', '"}'), 20),
        Attack("escaped letters", COMPLETIONS, letters("\\u0416", '{"prompt":"', '"}'), 20),
        Attack("one letter in a chat", CHAT, letters("a", '{"messages":[{"role":"user","content":"', '"}]}'), 20),
        Attack("one letter to /tokenize", TOKENIZE, letters("a", '{"prompt":"', '"}'), 20),
        Attack("a long field name", COMPLETIONS, letters("a", '{"prompt":"Once","', '":1}')),
        Attack("not JSON", COMPLETIONS, letters("{", "", "")),
        Attack("unfinished bodies", COMPLETIONS, letters("a", '{"prompt":"', '"}'), 150, finished=False),
        *(Attack(f"template: {name}", CHAT, chat(name), 2) for name in TEMPLATES),
        Attack("a large schema", CHAT, chat("x", response_format=schema(large_schema())), 8),
        Attack("a slow regex", COMPLETIONS, completion(structured_outputs={"regex": SLOW_REGEX}), 8),
    ]  # fmt: skip


def attacks_by_parameters() -> list[Attack]:
    """Fields of vLLM's and SGLang's servers."""
    return [
        Attack("allowed tokens x samples", COMPLETIONS, completion(
            allowed_token_ids=[7, 8] * 2048, n=128, max_tokens=4, ignore_eos=True)),
        Attack("bad words x samples", COMPLETIONS, completion(
            bad_words=[f"word {number}" for number in range(200)], n=128, max_tokens=4, ignore_eos=True)),
        Attack("long bad words", COMPLETIONS, completion(bad_words=["ab" * 512] * 256)),
        Attack("logprobs of prompts", COMPLETIONS, completion(
            prompt=[[7] * 2000] * 4, prompt_logprobs=63, max_tokens=1), 2),
        Attack("stop regexes x samples", COMPLETIONS, completion(
            stop_regex=[SLOW_REGEX, "[a-z ]{1,99}.{60}!", "(.{1,99}){1,99}q"], n=32, max_tokens=8, ignore_eos=True)),
        Attack("a GBNF grammar of many rules", COMPLETIONS, completion(guided_grammar=gbnf())),
        Attack("a large structural tag", COMPLETIONS, completion(
            response_format={"type": "structural_tag", "format": tags(500)})),
        Attack("many conversations", BATCH, filled('{"messages":[', '[{"role":"user","content":"x"}]', "]}")),
        Attack("as many conversations as are allowed", BATCH, response(
            messages=[[{"role": "user", "content": "x"}]] * 256, max_tokens=1)),
    ]  # fmt: skip


def gbnf() -> str:
    """Within the limit on a grammar's size, with a thousand rules that refer to each other."""
    rules = [f'r{number} ::= "a" r{(number * 7) % 1000} | r{(number + 1) % 1000} "b" | [a-z]' for number in range(1000)]
    return "\n".join(["root ::= r0", *rules])


def tags(count: int) -> dict[str, Any]:
    content = {"type": "regex", "pattern": "[a-z]{1,20}"}
    each = [{"type": "tag", "begin": f"<{number}>", "content": content, "end": "</>"} for number in range(count // 4)]
    return {"type": "triggered_tags", "triggers": ["<"], "tags": each}


def schema(what: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": what}}


def large_schema() -> dict[str, Any]:
    """Within the limit on a schema's size, and with more combinations than can be tried."""
    names = [f"field{number:03}" for number in range(300)]
    fields = {
        name: {"type": "string", "minLength": 1, "maxLength": 5000, "pattern": "^(a|b)*c(a|b)*$"} for name in names
    }
    return {"type": "object", "properties": fields, "additionalProperties": False}


def template() -> str:
    """A chat template that computes one of TEMPLATES if the first message is its name, else an ordinary one."""
    cases = "".join(
        f"{{% if messages[0].content == '{name}' %}}{text}{{% endif %}}\n" for name, text in TEMPLATES.items()
    )
    return cases + "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
