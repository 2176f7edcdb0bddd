"""Reads the event stream of an OpenAI-compatible server from bytes.

Owns server-sent events and the shapes of completion and chat chunks. Knows no network and no clock: bytes and times are
arguments. Lines end with \\n or \\r\\n; a lone \\r, which the standard also allows but no such server sends, ends none.
"""

import json
from typing import Any

REASONS = {"eos_token": "stop", "stop_sequence": "stop"}  # other servers' names for stop
ERROR_CHARS = 200  # most characters kept of an error's text


class Events:
    """Bytes in, data of whole events out; comments and other fields are dropped.

    >>> Events().feed(b": hello\\r\\ndata: 1\\ndata: 2\\n\\ndata:3\\n\\ndata: unfinished")
    [b'1\\n2', b'3']
    """

    def __init__(self) -> None:
        self.rest = b""
        self.lines: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self.lines.append(line[5:].removeprefix(b" "))
            elif not line and self.lines:
                found.append(b"\n".join(self.lines))
                self.lines = []
        return found

    def close(self) -> list[bytes]:
        """An event whose closing empty line is missing because the stream ended."""
        return self.feed(b"\n\n")


class StreamedAnswer:
    """One answer as it arrives: the times of its tokens and how it ended.

    Servers report token counts in different ways. Three are understood, and the most precise is used:
      exact   events contain their number of tokens (token_ids, logprobs, or a running usage)
      usage   the end contains the total; events are one token each if the numbers agree, else the tokens are spread
              evenly over the events with text, the first always at the first
      events  no counts at all: each event with text is one token
    """

    def __init__(self) -> None:
        self.events: list[tuple[float, bool, int | None]] = []  # time, has text, tokens if reported
        self.usage: dict[str, Any] = {}
        self.reason = ""
        self.error = ""
        self.done = False
        self.ended_s: float | None = None

    def add(self, data: bytes, now_s: float) -> None:
        """One event; ValueError if it is not a chunk. Events after the end are ignored."""
        if self.done or self.error:
            return
        if data.strip() == b"[DONE]":
            self.done = True
            self._end(now_s)
            return
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError(f"a chunk is a JSON object, not {type(chunk).__name__}")
        if chunk.get("error") or chunk.get("object") == "error":
            self.error = error_text(chunk)
            self._end(now_s)
            return
        before, usage = self.completion_tokens, chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        for choice in (chunk.get("choices") or [])[:1]:
            tokens, text = _token_count(choice), _has_text(choice)
            if tokens is None and usage and self.completion_tokens is not None:
                tokens = self.completion_tokens - (before or 0)
            if text or tokens is not None or "role" not in _part(choice):  # chat opens with a role and no token
                self.events.append((now_s, text, tokens))
            if reason := choice.get("finish_reason"):
                self.reason = REASONS.get(reason, str(reason))
                self._end(now_s)

    def _end(self, now_s: float) -> None:
        if self.ended_s is None:
            self.ended_s = now_s

    @property
    def completion_tokens(self) -> int | None:
        count = self.usage.get("completion_tokens")
        return count if isinstance(count, int) else None

    def token_times(self) -> tuple[list[float], str]:
        """The time of every token, and how they were counted: exact, usage or events."""
        total = self.completion_tokens
        exact = [when for when, _, tokens in self.events for _ in range(tokens or 0)]
        if exact and (total is None or total == len(exact)):
            return exact, "exact"
        with_text = [when for when, text, _ in self.events if text]
        if total is None:
            return with_text, "events"
        if len(self.events) == total:  # some tokens have no text
            return [when for when, _, _ in self.events], "usage"
        return spread_tokens(total, with_text or [when for when, _, _ in self.events]), "usage"


def spread_tokens(count: int, times: list[float]) -> list[float]:
    """Times of `count` tokens, spread evenly over these events; the first event always has one.

    >>> spread_tokens(5, [1.0, 2.0])
    [1.0, 1.0, 1.0, 2.0, 2.0]
    >>> spread_tokens(2, [1.0, 2.0, 3.0])
    [1.0, 2.0]
    """
    return [times[number * len(times) // count] for number in range(count)] if times else []


def _part(choice: dict[str, Any]) -> dict[str, Any]:
    """A completion's choice itself, a chat chunk's delta, or a whole message where a server does not stream."""
    part = choice.get("delta") or choice.get("message") or choice
    return part if isinstance(part, dict) else {}


def _has_text(choice: dict[str, Any]) -> bool:
    part = _part(choice)
    return any(part.get(name) for name in ("text", "content", "reasoning_content", "reasoning", "tool_calls"))


def _token_count(choice: dict[str, Any]) -> int | None:
    logprobs = choice.get("logprobs")
    listed = logprobs if isinstance(logprobs, dict) else {}
    for tokens in (choice.get("token_ids"), listed.get("tokens"), listed.get("content")):
        if isinstance(tokens, list):
            return len(tokens)
    return None


def error_text(body: Any) -> str:
    """The message in an error's body, whatever its shape; never empty."""
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(name):
            body = body[name]
    text = body if isinstance(body, str) else json.dumps(body)
    return " ".join(text.split())[:ERROR_CHARS] or "no message"
