"""Traces: real requests as arrival time, prompt length, output length and, where known, shared prefixes.

Reads the Azure, Mooncake and BurstGPT formats and Shoal's own CSV or JSONL, gzipped or not; the format is recognised by
its columns. Owns formats and their errors. Knows no engine.

| format    | columns                                                                       |
|-----------|-------------------------------------------------------------------------------|
| own       | arrival_s, prompt_tokens, output_tokens; tenant, if it has one                |
| Azure     | TIMESTAMP, ContextTokens, GeneratedTokens                                     |
| BurstGPT  | Timestamp, …, Request tokens, Response tokens, …                              |
| Mooncake  | timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens)    |
"""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.errors import BadConfig

MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. Equal leading `prefix` ids mean equal leading blocks of `prefix_block` tokens.

    Scaling may leave a fraction of a token in a block; then block k ends at round((k + 1) * prefix_block).
    """

    at_s: float
    prompt: int
    output: int
    prefix: tuple[int, ...] = ()
    prefix_block: float = 0
    tenant: str = ""


Row = Mapping[str, Any]


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"{value!r} is not a time")
    return seconds


def _tokens(value: Any) -> int:
    tokens = float(value)
    if not tokens.is_integer() or tokens < 0:
        raise ValueError(f"{value!r} is not a number of tokens")
    return int(tokens)


def _own(row: Row) -> TraceRequest:
    at_s, prompt, output = _seconds(row["arrival_s"]), _tokens(row["prompt_tokens"]), _tokens(row["output_tokens"])
    return TraceRequest(at_s, prompt, output, tenant=_tenant(row.get("tenant")))


def _tenant(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"the tenant must be a text, not {value!r}")
    return value or ""


def _azure(row: Row) -> TraceRequest:
    at = datetime.fromisoformat(row["TIMESTAMP"])  # fromisoformat drops the seventh digit of a second
    at = at.replace(tzinfo=at.tzinfo or UTC)  # not the local zone: a trace has no clock changes
    return TraceRequest(at.timestamp(), _tokens(row["ContextTokens"]), _tokens(row["GeneratedTokens"]))


def _burstgpt(row: Row) -> TraceRequest:
    return TraceRequest(_seconds(row["Timestamp"]), _tokens(row["Request tokens"]), _tokens(row["Response tokens"]))


def _mooncake(row: Row) -> TraceRequest:
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    at_s, prompt, output = (
        _seconds(row["timestamp"]) / 1000,
        _tokens(row["input_length"]),
        _tokens(row["output_length"]),
    )
    return TraceRequest(at_s, prompt, output, tuple(ids), MOONCAKE_BLOCK if ids else 0)


FORMATS: dict[str, tuple[frozenset[str], Callable[[Row], TraceRequest]]] = {
    "own": (frozenset({"arrival_s", "prompt_tokens", "output_tokens"}), _own),
    "Azure": (frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    "BurstGPT": (frozenset({"Timestamp", "Request tokens", "Response tokens"}), _burstgpt),
    "Mooncake": (frozenset({"timestamp", "input_length", "output_length"}), _mooncake),
}


def read_trace(path: str | Path, most: int | None = None) -> list[TraceRequest]:
    """The first `most` requests with a prompt and an output, by arrival; the first arrives at 0."""
    path = Path(path)
    found: list[TraceRequest] = []
    parse: Callable[[Row], TraceRequest] | None = None
    for line, row in _rows(path):
        if parse is None:
            parse = _format_of(path, row)
        try:
            request = parse(row)
        except KeyError as error:
            raise BadConfig(f"{path}: line {line} has no {error}") from error
        except (ValueError, TypeError) as error:
            raise BadConfig(f"{path}: line {line} cannot be read: {error}") from error
        if request.prompt > 0 and request.output > 0:  # BurstGPT marks failed requests with 0
            found.append(request)
    if not found:
        raise BadConfig(f"{path} has no requests")
    found.sort(key=lambda request: request.at_s)
    return [replace(request, at_s=request.at_s - found[0].at_s) for request in found[:most]]


def _format_of(path: Path, row: Row) -> Callable[[Row], TraceRequest]:
    for needed, parse in FORMATS.values():
        if needed <= row.keys():
            return parse
    known = "; ".join(f"{name}: {', '.join(sorted(needed))}" for name, (needed, _) in FORMATS.items())
    raise BadConfig(f"{path} has columns {', '.join(map(str, row))}, which match no known trace format; known: {known}")


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    """(line, row) of every row."""
    if path.name.removesuffix(".gz").endswith((".jsonl", ".json")):
        for number, line in enumerate(_lines(path), start=1):
            if line.strip():
                yield number, _json_row(path, number, line)
        return
    table = csv.DictReader(_lines(path))
    try:
        for row in table:
            if None in row:
                raise BadConfig(f"{path}: line {table.line_num} has more fields than the header line")
            yield table.line_num, row
    except csv.Error as error:
        raise BadConfig(f"{path}: line {table.reader.line_num} is not CSV: {error}") from error


def _lines(path: Path) -> Iterator[str]:
    number = 0
    try:
        opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path}: line {number} is not UTF-8: {error.reason}") from error
    except FileNotFoundError as error:
        raise BadConfig(
            f"there is no trace {str(path)!r}; give the path of a trace file, or azure-conv or azure-code for lengths "
            "like those of these traces"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise BadConfig(f"cannot read the trace {path} after line {number}: {error}") from error


def _json_row(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadConfig(f"{path}: line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadConfig(f"{path}: line {number} must be a JSON object, not {type(row).__name__}")
    return row


@dataclass(frozen=True)
class Fitted:
    """A scaled and capped trace: the requests, and how much they were changed."""

    requests: list[TraceRequest]
    scaled_by: float
    capped_share: float  # share of requests whose prompt or output hit a cap


def fit(
    requests: list[TraceRequest],
    *,
    scale: float = 1.0,
    output_scale: float | None = None,
    max_prompt: int | None = None,
    max_output: int | None = None,
) -> Fitted:
    """Scale all lengths (outputs by their own scale if given), then cap them; shared prefixes scale along.

    >>> fit([TraceRequest(0, 1000, 100)], scale=0.1, max_prompt=64).requests[0]
    TraceRequest(at_s=0, prompt=64, output=10, prefix=(), prefix_block=0, tenant='')
    """
    output_scale = scale if output_scale is None else output_scale
    for name, value in (
        ("scale", scale),
        ("output_scale", output_scale),
        ("max_prompt", max_prompt),
        ("max_output", max_output),
    ):
        if value is not None and not 0 < value < math.inf:
            raise BadConfig(f"{name} must be above 0, not {value}")
    fitted, capped = [], 0
    for request in requests:
        prompt, output = max(1, round(request.prompt * scale)), max(1, round(request.output * output_scale))
        fits = (max_prompt is None or prompt <= max_prompt) and (max_output is None or output <= max_output)
        capped += not fits
        fitted.append(
            replace(
                request,
                prompt=min(prompt, max_prompt or prompt),
                output=min(output, max_output or output),
                prefix_block=request.prefix_block * scale if request.prefix else 0,
            )
        )
    return Fitted(fitted, scale, capped / max(len(requests), 1))
