"""The client behind `shoal bench serve`: requests to any OpenAI-compatible server, each token's time recorded.

Open loop: a request is sent at its arrival time, whatever the state of earlier ones, and its latency counts from that
time even if this client sends it late; so a server that falls behind cannot slow down the load and look better. Closed
loop: a fixed number of users, each with one request at a time. A failed request is a result, never a crash. Knows HTTP
and records. Knows no engine.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp
from tqdm import tqdm
from yarl import URL

from shoal.bench.cpu_noise import noise_in, under_banner, watch_server
from shoal.bench.record import Promise, RequestRecord, RunRecord, spread, summarise
from shoal.bench.sse import Events, StreamedAnswer, error_text
from shoal.errors import BadConfig
from shoal.workload.traces import TraceRequest

Prompt = list[int] | str
DRAIN_S = 1.0  # wait for the server to close a finished stream; then the connection is dropped
IDLE_S = 1.0  # keep-alive of a connection: shorter than servers', so that none closes it under a new request
COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city name team minute idea body back parent face level office door health person art "
    "war history party result change morning reason research girl guy moment air teacher force order light fish boat"
)
WORDS = COMMON.split()


def base_url(url: str) -> URL:
    """The server's address, with or without /v1 at its end.

    >>> base_url("http://127.0.0.1:8000/v1/")
    URL('http://127.0.0.1:8000')
    """
    try:
        found = URL(url.rstrip("/").removesuffix("/v1"))
    except ValueError as error:
        raise BadConfig(f"{url!r} is not an address: {error}; give one like http://127.0.0.1:8000") from error
    if found.scheme not in ("http", "https") or not found.host:
        raise BadConfig(f"{url!r} is not the address of a server; give one like http://127.0.0.1:8000")
    return found


def as_text(prompts: Sequence[list[int]]) -> list[str]:
    """Words for token ids, about a token each; equal ids stay equal words, so shared prefixes stay shared.

    >>> as_text([[0, 1, 2]])
    ['time year people']
    """
    return [" ".join(WORDS[id % len(WORDS)] for id in prompt) for prompt in prompts]


async def run_serve(
    url: str,
    requests: Sequence[TraceRequest],
    prompts: Sequence[Prompt],
    *,
    model: str,
    api_key: str | None = None,
    closed: int | None = None,
    timeout_s: float = 600.0,
    ignore_eos: bool = True,
    progress: bool = False,
    chat: bool = False,
) -> RunRecord:
    """Send every request at its time, or `closed` requests at a time, and return the record."""
    if len(requests) != len(prompts):
        raise BadConfig(f"{len(requests)} requests need {len(requests)} prompts, not {len(prompts)}")
    if chat and not all(isinstance(prompt, str) for prompt in prompts):
        raise BadConfig("a chat takes text, not token ids; use as_text(prompts)")
    if closed is not None and closed < 1:
        raise BadConfig(f"concurrency must be at least 1, not {closed}")
    if not timeout_s > 0:
        raise BadConfig(f"timeout must be above 0 seconds, not {timeout_s}")
    server = base_url(url)
    watch = watch_server(server.host or "", server.port or 0)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=_headers(api_key),
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        with tqdm(total=len(requests), unit="req", disable=not progress) as bar:
            client = _Client(session, server, model, chat, ignore_eos, timeout_s, bar)
            if closed is None:
                records = await client.open_loop(requests, prompts)
            else:
                records = await client.closed_loop(requests, prompts, closed)
    span_s = 0.0 if closed else max((one.at_s for one in requests), default=0.0)
    return RunRecord(
        preset="serve",
        label=model,
        rate=(len(requests) - 1) / span_s if span_s else 0.0,
        settings={
            "url": str(server.with_user(None)),  # without a password
            "model": model,
            "chat": chat,
            "concurrency": closed,
            "timeout_s": timeout_s,
            "ignore_eos": ignore_eos,
            "failures": client.failures(records),
            "counted": dict(client.counted),
            "client_late_s": spread(client.late_s),
        },
        slots=client.most_open,
        requests=records,
        passes=[],
        seconds=max((one.ended_s or 0.0 for one in records), default=0.0),
        busy_s=0.0,
        noise=watch.noise() if watch else None,
    )


async def first_model(url: str, api_key: str | None = None, timeout_s: float = 10.0) -> str:
    """The name of the server's first model."""
    server = base_url(url)
    try:
        async with (
            asyncio.timeout(timeout_s),
            aiohttp.ClientSession(headers=_headers(api_key)) as session,
            session.get(server / "v1/models") as response,
        ):
            if response.status != 200:
                raise BadConfig(f"{url} does not list its models (HTTP {response.status}); give --model")
            return str(json.loads(await response.read())["data"][0]["id"])
    except TimeoutError as error:
        raise BadConfig(f"{url} did not answer within {timeout_s:g} s; is the server ready?") from error
    except (aiohttp.ClientError, OSError) as error:
        raise BadConfig(f"cannot reach {url}: {error}; is the server running?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise BadConfig(f"{url} does not list its models in OpenAI's format; give --model") from error


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class _Client:
    """One run: the session, the start time and the counters."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: URL,
        model: str,
        chat: bool,
        ignore_eos: bool,
        timeout_s: float,
        bar: "tqdm[Any]",
    ) -> None:
        self.session = session
        self.path = server / ("v1/chat/completions" if chat else "v1/completions")
        self.chat = chat
        self.timeout_s = timeout_s
        self.bar = bar
        self.common: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            self.common["ignore_eos"] = True
        self.begun = time.perf_counter()
        self.open = self.most_open = 0
        self.late_s: list[float] = []
        self.counted: Counter[str] = Counter()
        self.example: dict[str, str] = {}  # reason → text of the first such failure

    def now_s(self) -> float:
        return time.perf_counter() - self.begun

    async def open_loop(self, requests: Sequence[TraceRequest], prompts: Sequence[Prompt]) -> list[RequestRecord]:
        records = [RequestRecord(one.at_s, one.prompt, one.output) for one in requests]
        self.begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in sorted(range(len(requests)), key=lambda number: requests[number].at_s):
                body = self.body(prompts[number], requests[number].output)  # prepared before the arrival time
                await asyncio.sleep(0)  # lets streams be read even when this loop is late
                while (early_s := requests[number].at_s - self.now_s()) > 0:
                    await asyncio.sleep(early_s)
                self.late_s.append(-early_s)
                group.create_task(self.ask(records[number], body))
        return records

    async def closed_loop(
        self, requests: Sequence[TraceRequest], prompts: Sequence[Prompt], users: int
    ) -> list[RequestRecord]:
        records = [RequestRecord(0.0, one.prompt, one.output) for one in requests]
        waiting = iter(range(len(requests)))
        self.begun = time.perf_counter()

        async def user() -> None:
            for number in waiting:
                body = self.body(prompts[number], requests[number].output)
                records[number].arrived_s = self.now_s()
                await self.ask(records[number], body)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(users, len(requests))):
                group.create_task(user())
        return records

    def body(self, prompt: Prompt, output: int) -> bytes:
        given = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        return json.dumps({**self.common, **given, "max_tokens": output}).encode()

    async def ask(self, record: RequestRecord, body: bytes) -> None:
        """One request, from sending to its end or failure."""
        answer, failure = StreamedAnswer(), ("", "")
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            async with asyncio.timeout(self.timeout_s):
                failure = await self.talk(answer, body)
        except Exception as error:
            failure = ("", "") if answer.done else _failure(error)
        self.open -= 1
        self.note(record, answer, *failure)
        self.bar.update()

    async def talk(self, answer: StreamedAnswer, body: bytes) -> tuple[str, str]:
        """Send and read to the end; returns (reason, text) of a failure, or two empty strings."""
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.path, data=body, headers=headers) as response:
            if response.status != 200:
                return f"http {response.status}", _body_text(await response.read())
            if response.content_type == "application/json":  # does not stream
                answer.add(await response.read(), self.now_s())
            else:
                await self.listen(answer, response.content)
        if answer.error:
            return "error in stream", answer.error
        if not answer.reason and not answer.done:
            return "cut off", "the stream ended without a finish_reason or [DONE]"
        return "", ""

    async def listen(self, answer: StreamedAnswer, content: aiohttp.StreamReader) -> None:
        events = Events()
        async for data in content.iter_any():
            now_s = self.now_s()
            for event in events.feed(data):
                answer.add(event, now_s)
            if answer.done or answer.error:
                with suppress(TimeoutError, aiohttp.ClientError):
                    async with asyncio.timeout(DRAIN_S):
                        await content.read()
                return
        for event in events.close():
            answer.add(event, self.now_s())

    def note(self, record: RequestRecord, answer: StreamedAnswer, failure: str, text: str) -> None:
        record.ended_s = answer.ended_s if answer.ended_s is not None and not failure else self.now_s()
        record.token_s, how = answer.token_times()
        if failure:
            self.example.setdefault(failure, text)
        else:
            self.counted[how] += 1
        short = "length" if len(record.token_s) >= record.output else "stop"
        record.reason = failure or answer.reason or short
        usage = answer.usage
        if isinstance(tokens := usage.get("prompt_tokens"), int):
            record.prompt = tokens
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
            record.cached_tokens = cached

    def failures(self, records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
        """Every failure reason, the most frequent first, with the text of its first failure."""
        counts = Counter(one.reason for one in records if one.reason not in ("stop", "length"))
        return [
            {"reason": reason, "count": count, "example": self.example.get(reason, "")}
            for reason, count in counts.most_common()
        ]


def _body_text(body: bytes) -> str:
    try:
        return error_text(json.loads(body))
    except ValueError:
        return error_text(body.decode(errors="replace"))


def _failure(error: Exception) -> tuple[str, str]:
    """(reason, text) of an exception; there are few reasons, so that they can be counted."""
    text = error_text(str(error) or type(error).__name__)
    match error:
        case TimeoutError():
            return "timeout", text
        case aiohttp.ClientConnectorError(os_error=ConnectionRefusedError()):
            return "connection refused", text
        case aiohttp.ClientConnectorError():
            return "cannot connect", text
        case aiohttp.ClientError() | OSError():
            return "cut off", text
        case ValueError() | TypeError() | AttributeError() | LookupError():
            return "bad stream", text
        case _:
            return f"client error {type(error).__name__}", text


def serve_summary(run: RunRecord, promise: Promise, price_per_hour: float = 0.0) -> dict[str, Any]:
    """All figures of one run, without those that only an engine knows (passes, padding, KV)."""
    unknown = {
        *("passes", "useful_tokens", "padded_tokens", "padding_share", "recomputed_tokens", "preemptions"),
        *("vain_tokens", "wasted_share"),
        *("slot_use", "budget_use", "device_busy", "kv_waste", "kv_peak", "waited_s"),
        *("mfu", "mbu", "useful_work"),
    }
    known = {name: value for name, value in summarise(run, promise, price_per_hour).items() if name not in unknown}
    prompts = sum(one.prompt for one in run.requests if one.reason in ("stop", "length"))
    return {
        **known,
        "offered_request_s": run.rate,
        "most_open": run.slots,
        "prompt_tokens": prompts,
        "output_tokens": sum(len(one.token_s) for one in run.requests),
        "promise": {"ttft_s": promise.ttft_s, "gap_s": promise.gap_s},
        **run.settings,
    }


def serve_table(summary: dict[str, Any]) -> str:
    """The figures as a table, for people."""
    offered = "all at once" if summary["concurrency"] is None else f"{summary['concurrency']} users, closed loop"
    if summary["offered_request_s"]:
        offered = f"{summary['offered_request_s']:.2f} requests/s, open loop"
    promise, counted = summary["promise"], summary["counted"]
    rows = [
        ("server", f"{summary['url']}, model {summary['model']}"),
        ("offered", offered),
        (
            "requests",
            f"{summary['requests']:,}, {summary['finished']:,} finished, {summary['most_open']:,} open at most",
        ),
        ("tokens", f"{summary['prompt_tokens']:,} in, {summary['output_tokens']:,} out"),
        ("seconds", f"{summary['seconds']:.2f}"),
        ("requests/s", f"{summary['request_s']:.2f}"),
        ("output tok/s", f"{summary['output_tok_s']:,.1f}"),
        ("goodput", _goodput(summary, promise)),
    ]
    if summary["cost_per_million_tokens"]:
        rows.append(("cost", f"{summary['cost_per_million_tokens']:.2f} per million output tokens"))
    rows += [("failed", f"{one['count']:,} times {one['reason']}: {one['example']}") for one in summary["failures"]]
    if counted.get("events"):
        rows.append(
            ("note", f"{counted['events']:,} answers reported no token count: each event is counted as one token")
        )
    if summary["client_late_s"]["max"] > 0.1:
        rows.append(
            ("note", f"this client sent up to {summary['client_late_s']['max']:.2f} s late (counted as latency)")
        )
    noise = noise_in(summary)
    if noise and noise.remark():
        rows.append(("noise", f"{noise.remark()} of this machine, beside the client and a server that is here"))
    wide = max(len(name) for name, _ in rows)
    lines = [*(f"{name:<{wide}}  {value}" for name, value in rows), "", _spreads(summary)]
    return under_banner("\n".join(lines), [noise])


def _goodput(summary: dict[str, Any], promise: dict[str, float]) -> str:
    return (
        f"{summary['goodput_request_s']:.2f} requests/s, {summary['goodput_share']:.1%} of all "
        f"(first token in {promise['ttft_s']:g} s, mean gap {promise['gap_s'] * 1e3:g} ms)"
    )


def _spreads(summary: dict[str, Any]) -> str:
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    names = (
        ("first token", "ttft_s"),
        ("between tokens", "gap_s"),
        ("end to end", "e2e_s"),
        ("… per token", "normalised_s"),
    )
    lines = [f"{'milliseconds':<14}" + "".join(f"{column:>12}" for column in columns)]
    for name, key in names:
        lines.append(f"{name:<14}" + "".join(f"{summary[key][column] * 1e3:>12,.1f}" for column in columns))
    return "\n".join(lines)
