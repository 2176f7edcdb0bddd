"""What a stream of an OpenAI-compatible server says, read from bytes.

Owns server-sent events and the shapes of completion and chat chunks. Knows no network and no clock: bytes and times are
handed in. Lines end with \\n or \\r\\n; a lone \\r, which the standard also allows and no such server sends, ends none.
"""

import json
from typing import Any

REASONS = {"eos_token": "stop", "stop_sequence": "stop"}  # other words for the two good ends
SHORTEST = 200  # characters of an error's text worth keeping


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
        """An event that the end of the stream cut short of its empty line."""
        return self.feed(b"\n\n")


class StreamedAnswer:
    """One answer as it comes: when it spoke, how many tokens, how it ended.

    Servers count tokens in different ways, so three are understood, the best one wins:
      exact   events say how many tokens they hold (token_ids, logprobs, or a running usage)
      usage   the end says how many there were; events are one token each if the numbers agree, else the tokens are
              spread evenly over the events that brought text, the first always at the first
      events  nobody says: an event with text is a token
    """

    def __init__(self) -> None:
        self.events: list[tuple[float, bool, int | None]] = []  # when, with text?, tokens if told
        self.usage: dict[str, Any] = {}
        self.reason = ""
        self.error = ""
        self.done = False
        self.ended_s: float | None = None

    def add(self, data: bytes, now_s: float) -> None:
        """One event; ValueError if it is not a chunk. What comes after the end is not heard."""
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
            told, text = _tokens_told(choice), _has_text(choice)
            if told is None and usage and self.completion_tokens is not None:
                told = self.completion_tokens - (before or 0)
            if text or told is not None or "role" not in _said(choice):  # chat opens with a role and no token
                self.events.append((now_s, text, told))
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
        exact = [when for when, _, told in self.events for _ in range(told or 0)]
        if exact and (total is None or total == len(exact)):
            return exact, "exact"
        spoken = [when for when, text, _ in self.events if text]
        if total is None:
            return spoken, "events"
        if len(self.events) == total:  # some tokens have no text
            return [when for when, _, _ in self.events], "usage"
        return spread_tokens(total, spoken or [when for when, _, _ in self.events]), "usage"


def spread_tokens(count: int, times: list[float]) -> list[float]:
    """So many tokens over these events, evenly; the first event always has one.

    >>> spread_tokens(5, [1.0, 2.0])
    [1.0, 1.0, 1.0, 2.0, 2.0]
    >>> spread_tokens(2, [1.0, 2.0, 3.0])
    [1.0, 2.0]
    """
    return [times[number * len(times) // count] for number in range(count)] if times else []


def _said(choice: dict[str, Any]) -> dict[str, Any]:
    """A completion's choice itself, a chat chunk's delta, or a whole message where a server does not stream."""
    part = choice.get("delta") or choice.get("message") or choice
    return part if isinstance(part, dict) else {}


def _has_text(choice: dict[str, Any]) -> bool:
    part = _said(choice)
    return any(part.get(name) for name in ("text", "content", "reasoning_content", "reasoning", "tool_calls"))


def _tokens_told(choice: dict[str, Any]) -> int | None:
    logprobs = choice.get("logprobs")
    told = logprobs if isinstance(logprobs, dict) else {}
    for tokens in (choice.get("token_ids"), told.get("tokens"), told.get("content")):
        if isinstance(tokens, list):
            return len(tokens)
    return None


def error_text(body: Any) -> str:
    """The message in an error's body, whatever its shape; never empty."""
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(name):
            body = body[name]
    text = body if isinstance(body, str) else json.dumps(body)
    return " ".join(text.split())[:SHORTEST] or "no message"
