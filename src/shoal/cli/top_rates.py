"""The model of a server, its output rate and its times to the first token, for shoal top.

Reads GET /v1/models once and GET /metrics at each look. Knows the server by its URL; one that answers neither has no
such line.
"""

import json
import re
import ssl
import time
import urllib.request
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 5.0
TOKENS = "shoal_output_tokens_total"
FIRST = "shoal_time_to_first_token_seconds"
SAMPLE = re.compile(r"^(\w+)(?:\{([^}]*)\})? ([0-9.eE+-]+|\+Inf)(?: \d+)?$", re.MULTILINE)


class Counters:
    """What one scrape says: tokens, and first tokens by the upper edge of their times."""

    def __init__(self, text: str, at_s: float) -> None:
        self.at_s = at_s
        self.tokens = 0.0
        self.first: dict[float, float] = {}
        for name, labels, value in SAMPLE.findall(text):
            if name == TOKENS:
                self.tokens += float(value)
            elif name == f"{FIRST}_bucket":
                edge = re.search(r'le="([^"]+)"', labels)
                if edge:
                    self.first[float(edge[1])] = self.first.get(float(edge[1]), 0.0) + float(value)

    def since(self, before: "Counters | None") -> "Counters":
        """The difference to an earlier scrape; a server that was restarted in between begins again."""
        made = Counters("", self.at_s)
        if before is None or before.tokens > self.tokens:
            made.tokens, made.first = self.tokens, dict(self.first)
        else:
            made.tokens = self.tokens - before.tokens
            made.first = {edge: count - before.first.get(edge, 0.0) for edge, count in self.first.items()}
        return made

    def first_token_s(self, share: float) -> float | None:
        """The time within which this share of first tokens came: between two edges, in proportion.

        >>> made = Counters("", 0)
        >>> made.first = {0.1: 50, 0.2: 100, float("inf"): 100}
        >>> made.first_token_s(0.5), made.first_token_s(0.75)
        (0.1, 0.15000000000000002)
        """
        edges = sorted(self.first)
        if not edges or not self.first[edges[-1]]:
            return None
        wanted, low, below = share * self.first[edges[-1]], 0.0, 0.0
        for edge in edges:
            if self.first[edge] >= wanted:
                if edge == float("inf"):
                    return low
                inside = self.first[edge] - below
                return low + (edge - low) * ((wanted - below) / inside if inside else 1.0)
            low, below = edge, self.first[edge]
        return low


class ServerRates:
    """One line about a server, from its latest scrapes."""

    def __init__(self, url: str, key: str | None, insecure: bool, now_s: Callable[[], float] = time.monotonic) -> None:
        self.url, self.key, self.insecure, self.now_s = url.rstrip("/"), key, insecure, now_s
        self.model = ""
        self.before: Counters | None = None

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path)
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        context = ssl._create_unverified_context() if self.insecure else None
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            found: bytes = answer.read()
            return found

    def lines(self) -> list[str]:
        """None if the server does not answer."""
        try:
            if not self.model:
                self.model = ", ".join(str(one["id"]) for one in json.loads(self._get("/v1/models"))["data"])
            now = Counters(self._get("/metrics").decode(), self.now_s())
        except (OSError, ValueError, KeyError, TypeError):
            return []
        line = in_words(self.model, now, self.before)
        self.before = now
        return [line]


def in_words(model: str, now: Counters, before: Counters | None) -> str:
    """The first look has no rate yet; its times are those since the server began.

    >>> early, late = Counters("shoal_output_tokens_total 100", 0), Counters("shoal_output_tokens_total 150", 2)
    >>> in_words("tiny", late, early)
    'tiny   25.0 tok/s'
    """
    parts: list[Any] = [model]
    if before is not None and now.at_s > before.at_s:
        parts.append(f"{now.since(before).tokens / (now.at_s - before.at_s):,.1f} tok/s")
    recent = now.since(before)
    shown = recent if recent.first_token_s(0.5) is not None else now
    half, most = shown.first_token_s(0.5), shown.first_token_s(0.99)
    if half is not None and most is not None:
        parts.append(f"TTFT p50 {1000 * half:,.0f} ms, p99 {1000 * most:,.0f} ms")
    return "   ".join(parts)
