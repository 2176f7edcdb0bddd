"""Requests that went wrong on their way: good ones, changed at random, repeatable by their number.

Knows what good requests look like and how to spoil them: as JSON, as bytes, and in their heads.
"""

import copy
import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

Json = Any
CHAT: list[Json] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me about fish."}]
SCHEMA: Json = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "cm": {"type": "integer", "minimum": 1}},
    "required": ["name", "cm"],
    "additionalProperties": False,
}
GOOD: list[tuple[str, dict[str, Json]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 3}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2, "stream": True, "return_token_ids": True}),
    ("/v1/completions", {"prompt": ["a", [5, 6]], "n": 2, "best_of": 3, "logprobs": 2, "echo": True, "max_tokens": 2}),
    (
        "/v1/completions",
        {
            "prompt": "x", "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7,
            "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": 1.5},
            "stop": ["zz", "\n"], "stop_token_ids": [9], "min_tokens": 1, "ignore_eos": True, "timeout": 5,
            "priority": 1, "cache_salt": "s", "include_stop_str_in_output": True, "skip_special_tokens": False,
        },
    ),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "[a-c]{1,3}"}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}),
    ("/v1/chat/completions", {"model": "tiny", "messages": CHAT, "max_tokens": 3, "timeout": 5}),
    (
        "/v1/chat/completions",
        {
            "messages": [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": "Hm."}]}, CHAT[1]],
            "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2,
            "max_completion_tokens": 2, "chat_template_kwargs": {"mood": "good"}, "timeout": 5, "user": "u",
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": CHAT, "max_tokens": 8, "timeout": 5,
            "response_format": {"type": "json_schema", "json_schema": {"name": "fish", "schema": SCHEMA}},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                *CHAT,
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "swim", "arguments": '{"far": true}'}}
                ]},
                {"role": "tool", "tool_call_id": "c", "content": "done"},
            ],
            "tools": [{"type": "function", "function": {"name": "swim", "parameters": SCHEMA, "strict": True}}],
            "tool_choice": {"type": "function", "function": {"name": "swim"}}, "parallel_tool_calls": False,
            "max_tokens": 4, "timeout": 5, "reasoning_effort": "low", "include_reasoning": True,
            "thinking_token_budget": 3,
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hm."}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "swim", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "done"}]},
            ],
            "max_tokens": 3, "system": "Be brief.", "stop_sequences": ["z"], "stream": True,
            "tools": [{"name": "swim", "input_schema": SCHEMA}], "tool_choice": {"type": "any"},
            "thinking": {"type": "enabled", "budget_tokens": 5},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "input_text", "text": "Hm."}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Well"}]},
                {"type": "function_call", "call_id": "c", "name": "swim", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c", "output": "done"},
            ],
            "max_output_tokens": 3, "instructions": "Swim.", "stream": True, "truncation": "auto",
            "tools": [{"type": "function", "name": "swim", "parameters": SCHEMA, "strict": True}],
            "tool_choice": {"type": "function", "name": "swim"}, "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "store": True, "top_logprobs": 2,
        },
    ),
    (
        "/v1/responses",
        {
            "input": "Hi", "max_output_tokens": 3, "previous_response_id": None, "store": None, "background": True,
            "text": {"format": {"type": "json_schema", "name": "fish", "schema": SCHEMA}, "verbosity": "low"},
        },
    ),
    ("/v1/responses/input_tokens", {"input": "Hi", "instructions": "Be brief."}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}], "system": "Be brief."}),
    (
        "/api/chat",
        {
            "messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 3, "temperature": 0.5},
            "format": "json", "think": False, "keep_alive": "5m",
        },
    ),
    ("/api/generate", {"prompt": "Hi", "raw": True, "stream": False, "options": {"num_predict": 3}}),
    ("/api/show", {"model": "tiny"}),
    ("/tokenize", {"prompt": "The sea is"}),
    ("/tokenize", {"messages": CHAT, "add_generation_prompt": True}),
    ("/tokenize", {"prompt": ["The sea", "is"], "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6, 7], "skip_special_tokens": True}),
    ("/detokenize", {"tokens": [[5, 6], [7]]}),
    (
        "/generate",
        {
            "text": ["The sea", "is"], "sampling_params": {"max_new_tokens": 3, "temperature": 0.5, "stop": ["x"]},
            "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "rid": "mine",
        },
    ),
    ("/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "regex": "a+"}, "stream": True}),
]  # fmt: skip
MORE_NAMES = {"tools", "suffix", "chat_template", "tier", "metadata", "", "self", "messages"}
NAMES = sorted({name for _, body in GOOD for name in body} | MORE_NAMES)


def nested(depth: int) -> Json:
    value: Json = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


ODD: list[Json] = [
    None, True, False, 0, -1, 1, 2, 127, 128, 129, 1024, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**30, -(10**30),
    0.0, -0.5, 1e-300, 1e308, 0.1, "", " ", "a", "\0", "\ud800", "\udfff\ud800", "\ufeff", "é🐟", "x" * 5000,
    "NaN", "[[", "{{ 7*7 }}", "{% for x in y %}", "../../etc/passwd", "http://127.0.0.1:1/", "a" * 70, "(a+)+$", "[",
    "\\", "a{9999}",
    [], {}, [[]], [{}], {"a": {}}, [None], ["a"] * 100, [0] * 300, [[5]], [5, "a"], {"type": "text"},
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}, {"": 0}, {"5": 1}, {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}}, nested(70), nested(150),
]  # fmt: skip
PIECES = [
    b"", b"\0", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"NaN", b"-Infinity", b"1e999", b"9" * 50,
    b"-", b"\"", b"//",
    b"\\", b"\\ud800", b"\\u0000", b"{", b"}", b"[" * 300, b"]", b",", b":", b"null", b"true", b" " * 100, b"\r\n",
]  # fmt: skip
HEADERS: dict[bytes, list[bytes]] = {
    b"content-type": [b"application/json", b"text/plain", b"", b"application/json; charset=x", b"a" * 500, b"\xff"],
    b"content-length": [b"0", b"-1", b"99999999999999999999", b"5", b"many", b"0x10", b"1" * 300, b""],
    b"content-encoding": [b"gzip", b"identity", b"br, gzip", b"\0"],
    b"transfer-encoding": [b"chunked", b"identity", b"gzip, chunked"],
    b"authorization": [b"Bearer x", b"Basic eDp5", b"Basic !!!", b"Basic \xff", b"Bearer", b"", b"\xff" * 100],
    b"x-request-id": [b"mine", b"", b"\xff", b"a b", b"x" * 1000, b"\r", b"\n"],
    b"traceparent": [b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", b"\xff\xfe", b"-" * 50],
    b"accept": [b"*/*", b"\xff"],
    b"origin": [b"https://a.example", b"null", b"\xff"],
    b"access-control-request-method": [b"POST", b"\xff"],
    b"if-none-match": [b'"x"', b"*"],
    b"host": [b"front", b"", b"\xff"],
    b"expect": [b"100-continue", b"x"],
    b"connection": [b"close", b"keep-alive", b"upgrade"],
    b"upgrade": [b"websocket", b"h2c"],
    b"x-forwarded-for": [b"10.0.0.1"],
    b"x-odd": [b"\t", b"v" * 3000],
}
PATHS = [
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/models/tiny", "/health",
    "/metrics", "/version", "/debug/requests", "/openapi.json", "/docs", "/", "/static/chat.js", "/nothing",
    "/v1/models/", "/v1/models/\0", "/%00", "//", "/static/../app.py", "/v1/completions/", "/\ufffd",
    "/v1/models/" + "m" * 3000, "/v1/responses", "/v1/responses/resp_1", "/v1/responses/resp_1/input_items",
    "/v1/responses/resp_1/cancel", "/v1/responses/resp_1?stream=true&starting_after=3", "/generate",
    "/v1/responses/\0", "/v1/responses/" + "r" * 3000,
]  # fmt: skip
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "POSTS"]


@dataclass
class Case:
    """One request."""

    number: int
    method: str
    path: str
    body: bytes
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    leaves: bool = False  # hangs up as soon as it has asked

    def raw(self) -> bytes:
        """As it goes over a socket, with whatever is wrong in it."""
        lines = [b"%b %b HTTP/1.1" % (self.method.encode(), self.path.encode("utf-8", "replace"))]
        if not any(name == b"connection" for name, _ in self.headers):
            lines.append(b"connection: close")
        lines += [name + b": " + value for name, value in self.headers]
        return b"\r\n".join([*lines, b"", b""]) + self.body


def case(seed: int, number: int) -> Case:
    """Always the same for the same numbers."""
    random = Random(f"{seed}/{number}")
    path, good = random.choice(GOOD)
    body = json.dumps(spoiled_json(copy.deepcopy(good), random)).encode()
    if random.random() < 0.3:
        body = spoiled_bytes(body, random)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    made = Case(number, "POST", path, body, headers, leaves=random.random() < 0.05)
    if random.random() < 0.25:
        spoil_headers(made.headers, random)
    if random.random() < 0.08:
        made.path = random.choice(PATHS)
    if random.random() < 0.05:
        made.method = random.choice(METHODS)
    return made


def json_case(seed: int, number: int) -> tuple[str, Json]:
    """Path and body that is JSON at least."""
    random = Random(f"{seed}/{number}")
    path, good = random.choice(GOOD)
    return path, spoiled_json(copy.deepcopy(good), random)


def raw_case(seed: int, number: int) -> bytes:
    """Bytes for a socket."""
    random = Random(f"{seed}/{number}")
    raw = case(seed, number).raw()
    return spoiled_bytes(raw, random) if random.random() < 0.7 else raw


# ---- how things go wrong --------------------------------------------------------------------------------------------


def odd(random: Random) -> Json:
    return copy.deepcopy(random.choice(ODD))  # it may be spoiled further


def spoiled_json(value: Json, random: Random) -> Json:
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        value = _spoil_once(value, random)
    return value


def _spoil_once(value: Json, random: Random) -> Json:
    """Change something at a random place in a tree."""
    deeper = isinstance(value, dict | list) and value and random.random() < 0.75
    if not deeper:
        how = random.random()
        return odd(random) if how < 0.8 else [value] if how < 0.9 else {"a": value}
    if isinstance(value, list):
        place = random.randrange(len(value))
        how = random.random()
        if how < 0.15:
            del value[place]
        elif how < 0.3:
            value.extend([value[place]] * random.choice((1, 5, 200)))
        else:
            value[place] = _spoil_once(value[place], random)
        return value
    key = random.choice(sorted(value))
    how = random.random()
    if how < 0.1:
        del value[key]
    elif how < 0.2:
        value[random.choice(NAMES)] = value.pop(key)
    elif how < 0.4:
        value[random.choice(NAMES)] = odd(random)
    else:
        value[key] = _spoil_once(value[key], random)
    return value


def spoiled_bytes(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(changed) + 1)
        to = min(len(changed), at + random.choice((1, 1, 2, 8, 50)))
        how = random.randrange(5)
        if how == 0:
            changed[at:at] = random.choice(PIECES)
        elif how == 1:
            del changed[at:to]
        elif how == 2:
            changed[at:to] = random.choice(PIECES)
        elif how == 3 and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
        else:
            changed[at:at] = changed[at:to] * random.choice((1, 2, 20))
    return bytes(changed)


def spoil_headers(headers: list[tuple[bytes, bytes]], random: Random) -> None:
    for _ in range(random.choice((1, 1, 2, 4))):
        name = random.choice(sorted(HEADERS))
        value = random.choice(HEADERS[name])
        how = random.random()
        if how < 0.6:
            headers[:] = [one for one in headers if one[0] != name] + [(name, value)]
        elif how < 0.8:
            headers.append((name, value))
        elif headers:
            del headers[random.randrange(len(headers))]
