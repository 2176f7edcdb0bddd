"""The open-loop client against a real, small server in the same process. No test looks at absolute speed."""

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web

from shoal.bench import serve_command
from shoal.bench.record import Promise, RunRecord
from shoal.bench.serve import as_text, base_url, first_model, run_serve, serve_summary, serve_table
from shoal.bench.sse import Events, StreamedAnswer, error_text, spread_tokens
from shoal.cli.common import new_command
from shoal.errors import BadConfig, ImpossiblePair
from shoal.workload.traces import TraceRequest

T = TypeVar("T")
Body = dict[str, Any]
EASY = Promise(ttft_s=1000, gap_s=1000)


def within(work: Coroutine[Any, Any, T], seconds: float = 60) -> T:
    """Run it; a deadlock is a failure and not a hanging test."""

    async def limited() -> T:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(limited())


# ---- the server -----------------------------------------------------------------------------------------------------


@dataclass
class Fake:
    """An OpenAI server. `answer` writes one stream; every request body is kept."""

    answer: Callable[["Fake", Body, web.StreamResponse], Awaitable[None]]
    refuse: Callable[["Fake", Body], web.Response | None] = lambda fake, body: None
    asked: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        if (refused := self.refuse(self, body)) is not None:
            return refused
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self.answer(self, body, response)
        finally:
            self.open -= 1
        return response


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "fish-1"}, {"id": "fish-2"}]})


@asynccontextmanager
async def served(fake: Fake) -> AsyncIterator[Fake]:
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/completions", fake.handle)
    app.router.add_post("/v1/chat/completions", fake.handle)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()


def data(chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text(word: str, reason: str | None = None, **more: Any) -> bytes:
    return data({"object": "text_completion", "choices": [{"index": 0, "text": word, "finish_reason": reason, **more}]})


def usage(prompt: int, output: int) -> bytes:
    return data({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


async def plain(fake: Fake, body: Body, out: web.StreamResponse) -> None:
    """One event a token, then usage, then [DONE], as most servers do."""
    count = body["max_tokens"]
    for number in range(count):
        await out.write(text(f" w{number}", "length" if number == count - 1 else None))
        await asyncio.sleep(0.001)
    await out.write(usage(len(body.get("prompt", "")), count) + b"data: [DONE]\n\n")


def says(*parts: bytes | float) -> Callable[[Fake, Body, web.StreamResponse], Awaitable[None]]:
    """A server that always writes these parts; a number is a pause."""

    async def answer(fake: Fake, body: Body, out: web.StreamResponse) -> None:
        for part in parts:
            if isinstance(part, bytes):
                await out.write(part)
            else:
                await asyncio.sleep(part)

    return answer


def asking(count: int, output: int = 4, gap_s: float = 0.0) -> list[TraceRequest]:
    return [TraceRequest(number * gap_s, 3, output) for number in range(count)]


async def run(fake: Fake, requests: list[TraceRequest], **more: Any) -> RunRecord:
    async with served(fake):
        prompts = more.pop("prompts", [[1, 2, 3]] * len(requests))
        return await run_serve(fake.url, requests, prompts, model="fish", **more)


def one(answer: Callable[[Fake, Body, web.StreamResponse], Awaitable[None]], output: int = 4, **more: Any) -> RunRecord:
    return within(run(Fake(answer), asking(1, output), **more))


# ---- loops ----------------------------------------------------------------------------------------------------------


def test_the_open_loop_is_open() -> None:
    """No answer begins before the last request has arrived: a client that waited for answers would deadlock."""
    all_came = asyncio.Event()

    async def late(fake: Fake, body: Body, out: web.StreamResponse) -> None:
        if len(fake.asked) == 20:
            all_came.set()
        await all_came.wait()
        await plain(fake, body, out)

    fake = Fake(late)
    record = within(run(fake, asking(20, gap_s=0.01)))
    assert [request.reason for request in record.requests] == ["length"] * 20
    assert fake.most_open == record.slots == 20
    assert [request.arrived_s for request in record.requests] == pytest.approx([0.01 * k for k in range(20)])
    assert min(request.token_s[0] for request in record.requests) >= record.requests[-1].arrived_s


def test_requests_are_sent_by_their_times_in_any_order_of_the_list() -> None:
    requests = [TraceRequest(at_s, 3, output) for at_s, output in ((0.4, 3), (0.0, 1), (0.2, 2))]
    fake = Fake(plain)
    record = within(run(fake, requests))
    assert [body["max_tokens"] for body in fake.asked] == [1, 2, 3]
    assert [request.output for request in record.requests] == [3, 1, 2]
    assert [len(request.token_s) for request in record.requests] == [3, 1, 2]
    assert all(request.token_s[0] > request.arrived_s for request in record.requests)
    assert record.rate == pytest.approx(2 / 0.4)
    assert record.seconds == max(request.ended_s or 0 for request in record.requests) > 0.4


def test_the_closed_loop_keeps_its_concurrency() -> None:
    """Always three at a time: answers begin only when three requests are open, and there are never more."""
    three = asyncio.Barrier(3)

    async def together(fake: Fake, body: Body, out: web.StreamResponse) -> None:
        async with three:
            pass
        await plain(fake, body, out)

    fake = Fake(together)
    record = within(run(fake, asking(12, gap_s=100), closed=3))
    assert [request.reason for request in record.requests] == ["length"] * 12
    assert record.slots == 3
    assert record.rate == 0
    arrived = [request.arrived_s for request in record.requests]
    assert arrived == sorted(arrived)
    assert arrived[3] >= min(request.ended_s or 0 for request in record.requests[:3])


def test_more_users_than_requests() -> None:
    record = within(run(Fake(plain), asking(2), closed=50))
    assert [request.reason for request in record.requests] == ["length"] * 2


def test_three_hundred_streams_at_once() -> None:
    all_came = asyncio.Event()

    async def together(fake: Fake, body: Body, out: web.StreamResponse) -> None:
        if fake.open == 300:
            all_came.set()
        await all_came.wait()
        await plain(fake, body, out)

    fake = Fake(together)
    record = within(run(fake, asking(300, output=5)), seconds=200)
    assert {request.reason for request in record.requests} == {"length"}
    assert {len(request.token_s) for request in record.requests} == {5}
    assert fake.most_open == 300


def test_nothing_to_send() -> None:
    record = within(run(Fake(plain), []))
    assert (record.requests, record.seconds, record.rate) == ([], 0, 0)
    assert "requests" in serve_table(serve_summary(record, EASY))


# ---- what is sent ---------------------------------------------------------------------------------------------------


def test_a_completion_as_sent() -> None:
    fake = Fake(plain)
    within(run(fake, asking(1), api_key="secret", prompts=[[7, 8]]))
    assert fake.paths == ["/v1/completions"]
    assert fake.headers[0]["Authorization"] == "Bearer secret"
    assert fake.asked[0] == {
        "model": "fish",
        "prompt": [7, 8],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_a_chat_as_sent() -> None:
    fake = Fake(
        says(
            data({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
            *(data({"choices": [{"delta": {"content": word}}]}) for word in ("a", "b")),
            data({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
            usage(9, 2),
            b"data: [DONE]\n\n",
        )
    )
    record = within(run(fake, asking(1), chat=True, ignore_eos=False, prompts=as_text([[0, 5]])))
    assert fake.paths == ["/v1/chat/completions"]
    assert fake.asked[0]["messages"] == [{"role": "user", "content": "time man"}]
    assert "ignore_eos" not in fake.asked[0]
    assert "prompt" not in fake.asked[0]
    assert "Authorization" not in fake.headers[0]
    found = record.requests[0]
    assert (found.reason, len(found.token_s), found.prompt) == ("stop", 2, 9)


def test_the_key_and_passwords_are_in_no_record() -> None:
    async def whole() -> RunRecord:
        async with served(Fake(plain)) as fake:
            url = fake.url.replace("http://", "http://me:hidden@")
            return await run_serve(url, asking(1), ["x"], model="fish", api_key=None)

    output = repr(within(whole()))
    assert "hidden" not in output
    assert "secret" not in repr(within(run(Fake(plain), asking(1), api_key="secret")))


# ---- what comes back ------------------------------------------------------------------------------------------------


def test_token_times_are_arrival_times() -> None:
    record = one(says(text("a"), 0.2, text("b"), text("c"), 0.2, text("d", "length"), usage(3, 4), b"data: [DONE]\n\n"))
    request = record.requests[0]
    assert request.token_s == sorted(request.token_s)
    first, second, third = request.gaps_s
    assert second < max(first, third)
    assert request.ended_s is not None
    assert 0 < request.token_s[0] <= request.token_s[-1] <= request.ended_s
    assert record.settings["counted"] == {"usage": 1}


def test_several_tokens_in_an_event() -> None:
    record = one(says(text("a b c"), 0.05, text("d e", "length"), usage(3, 5), b"data: [DONE]\n\n"), output=5)
    times = record.requests[0].token_s
    assert len(times) == 5
    assert times[0] == times[2] < times[3] == times[4]


def test_events_that_contain_their_number_of_tokens() -> None:
    record = one(says(text("a", token_ids=[1]), 0.05, text("b c d", "length", token_ids=[2, 3, 4])))
    times = record.requests[0].token_s
    assert times[0] < times[1] == times[3]
    assert record.settings["counted"] == {"exact": 1}


def test_several_events_in_a_packet_and_events_torn_in_two() -> None:
    whole = (
        text("a") + text("b") + b": ping\n\nevent: x\nretry: 3\n" + text("ü") + text("d", "stop") + b"data: [DONE]\n\n"
    )
    record = one(says(whole[:50], 0.02, whole[50:51], 0.02, whole[51:-9], 0.02, whole[-9:]))
    assert (record.requests[0].reason, len(record.requests[0].token_s)) == ("stop", 4)
    assert record.settings["counted"] == {"events": 1}
    assert "reported no token count" in serve_table(serve_summary(record, EASY))


@pytest.mark.parametrize(
    ("parts", "reason", "tokens"),
    [
        ((text("a"), text("b", "stop")), "stop", 2),  # no [DONE]
        ((text("a"), text("b"), b"data: [DONE]\n\n"), "stop", 2),  # no reason
        ((text("a") * 4, b"data: [DONE]\n\n"), "length", 4),
        ((text("a"), text("b", "stop")[:-2]), "stop", 2),  # no last empty line
        ((text("a").replace(b"\n", b"\r\n"), b"data:[DONE]\r\n\r\n"), "stop", 1),
        ((text("a"), text("", "eos_token"), usage(3, 2)), "stop", 2),  # the end is a token too
        ((text(""), text(""), text("", "length"), usage(3, 3)), "length", 3),  # tokens without text
        ((text("a", "stop"), b"data: [DONE]\n\n", text("more")), "stop", 1),
    ],
)
def test_streams_that_end_well(parts: tuple[bytes, ...], reason: str, tokens: int) -> None:
    record = one(says(*parts))
    request = record.requests[0]
    assert (request.reason, len(request.token_s)) == (reason, tokens)
    assert record.settings["failures"] == []


def test_a_stream_left_open_after_done_is_done() -> None:
    record = one(says(text("a", "stop"), b"data: [DONE]\n\n", 30.0))
    assert record.requests[0].reason == "stop"


def test_a_server_that_does_not_stream() -> None:
    whole = {
        "choices": [{"text": "a b", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    fake = Fake(plain, refuse=lambda fake, body: web.json_response(whole))
    request = within(run(fake, asking(1))).requests[0]
    assert (request.reason, len(request.token_s)) == ("length", 2)


def test_usage_contains_prompt_and_cached_tokens() -> None:
    last = {"prompt_tokens": 77, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}}
    request = one(says(text("a", "stop"), data({"choices": [], "usage": last}))).requests[0]
    assert (request.prompt, request.cached_tokens) == (77, 64)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "reason", "example"),
    [
        (
            (text("a"), text("b"), data({"error": {"message": "out of fish", "code": 500}})),
            "error in stream",
            "out of fish",
        ),
        ((text("a"), text("b"), data({"object": "error", "message": "old way"})), "error in stream", "old way"),
        ((text("a"), text("b")), "cut off", "without a finish_reason"),
        ((text("a"), text("b"), b"data: {nonsense\n\n"), "bad stream", "Expecting"),
        ((text("a"), text("b"), b"data: [1]\n\n"), "bad stream", "list"),
        ((text("a"), text("b"), data({"choices": ["x"]})), "bad stream", "attribute"),
        ((text("a"), text("b", "abort"), b"data: [DONE]\n\n"), "abort", ""),
    ],
)
def test_streams_that_break(parts: tuple[bytes, ...], reason: str, example: str) -> None:
    record = one(says(*parts))
    request = record.requests[0]
    assert (request.reason, len(request.token_s)) == (reason, 2)
    assert request.ended_s is not None
    (failure,) = record.settings["failures"]
    assert (failure["reason"], failure["count"]) == (reason, 1)
    assert example in failure["example"]


def test_a_connection_lost_in_mid_stream() -> None:
    async def dies(fake: Fake, body: Body, out: web.StreamResponse) -> None:
        await out.write(text("a"))
        await asyncio.sleep(0.05)
        transport = out._req.transport if out._req else None
        assert transport is not None
        transport.abort()

    request = one(dies).requests[0]
    assert (request.reason, len(request.token_s)) == ("cut off", 1)


def test_a_timeout_keeps_the_tokens_received() -> None:
    request = one(says(text("a"), 30.0), timeout_s=10.0).requests[0]
    assert (request.reason, len(request.token_s)) == ("timeout", 1)


def test_statuses_are_counted_and_the_rest_goes_on() -> None:
    def refuse(fake: Fake, body: Body) -> web.Response | None:
        match body["max_tokens"] % 4:
            case 1:
                return web.json_response({"error": {"message": "queue is full", "type": "x"}}, status=429)
            case 2:
                return web.Response(text="<html>oh</html>", status=500)
            case 3:
                return web.json_response({"detail": [{"msg": "bad"}]}, status=422)
        return None

    requests = [TraceRequest(0, 3, output) for output in (1, 2, 4, 1, 3, 8)]
    record = within(run(Fake(plain, refuse), requests))
    assert [request.reason for request in record.requests] == [
        "http 429",
        "http 500",
        "length",
        "http 429",
        "http 422",
        "length",
    ]
    failures = {one["reason"]: (one["count"], one["example"]) for one in record.settings["failures"]}
    assert failures["http 429"] == (2, "queue is full")
    assert failures["http 500"] == (1, "<html>oh</html>")
    assert "bad" in failures["http 422"][1]
    summary = serve_summary(record, EASY)
    assert (summary["requests"], summary["finished"], summary["goodput_share"]) == (6, 2, pytest.approx(1 / 3))
    assert "2 times http 429: queue is full" in serve_table(summary)


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def test_a_refused_connection_is_a_result() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    record = within(run_serve(url, asking(5), ["x"] * 5, model="fish"))
    assert [request.reason for request in record.requests] == ["connection refused"] * 5
    assert all(request.token_s == [] and request.ended_s is not None for request in record.requests)
    assert serve_summary(record, EASY)["finished"] == 0
    assert "5 times connection refused" in serve_table(serve_summary(record, EASY))


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:nine", "localhost"])
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(BadConfig, match=r"http://127\.0\.0\.1:8000"):
        base_url(url)


def test_invalid_arguments_are_refused() -> None:
    for bad in ({"closed": 0}, {"timeout_s": 0}, {"chat": True}):
        with pytest.raises(BadConfig):
            within(run_serve("http://127.0.0.1:1", asking(1), [[1]], model="m", **bad))
    with pytest.raises(BadConfig, match="2 requests need 2 prompts"):
        within(run_serve("http://127.0.0.1:1", asking(2), [[1]], model="m"))


# ---- figures --------------------------------------------------------------------------------------------------------


def test_summary_figures() -> None:
    record = within(run(Fake(plain), asking(6, output=5)))
    summary = serve_summary(record, EASY, price_per_hour=2.0)
    assert (summary["requests"], summary["finished"], summary["failures"]) == (6, 6, [])
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (18, 30)
    assert summary["output_tok_s"] == pytest.approx(30 / record.seconds)
    assert summary["request_s"] == pytest.approx(6 / record.seconds)
    assert summary["goodput_share"] == 1
    assert summary["cost_per_million_tokens"] == pytest.approx(2 * record.seconds / 3600 / 30 * 1e6)
    assert 0 < summary["ttft_s"]["p50"] <= summary["ttft_s"]["p99"] <= summary["e2e_s"]["max"] <= record.seconds
    assert "kv_waste" not in summary
    assert serve_summary(record, Promise(1e-9, 1000))["goodput_share"] == 0
    assert json.loads(json.dumps(summary)) == summary


def test_the_table_names_every_spread() -> None:
    output = serve_table(serve_summary(within(run(Fake(plain), asking(3, gap_s=0.01))), EASY, 1.0))
    for word in ("first token", "between tokens", "end to end", "p99", "open loop", "goodput", "per million", "fish"):
        assert word in output
    closed = within(run(Fake(plain), asking(3), closed=2))
    assert "2 users, closed loop" in serve_table(serve_summary(closed, EASY))


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_how_bytes_are_cut(step: int) -> None:
    stream = b": hi\n\ndata: a\n\nid: 4\ndata:b\r\n\r\ndata: c\ndata: d\n\n\n\ndata: \xc3\xbc\n\nevent: e\n\ndata: z"
    events = Events()
    found = [event for at in range(0, len(stream), step) for event in events.feed(stream[at : at + step])]
    assert found == [b"a", b"b", b"c\nd", "ü".encode()]
    assert events.close() == [b"z"]
    assert events.close() == []


def test_a_running_usage_counts_tokens() -> None:
    answer = StreamedAnswer()
    for now_s, total in ((1.0, 1), (2.0, 4), (3.0, 5)):
        chunk = {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 1, "completion_tokens": total}}
        answer.add(json.dumps(chunk).encode(), now_s)
    assert answer.token_times() == ([1.0, 2.0, 2.0, 2.0, 3.0], "exact")


@pytest.mark.parametrize(("count", "events"), [(0, 3), (1, 1), (1, 5), (5, 1), (7, 3), (3, 7), (4, 4), (3, 0)])
def test_spread_tokens(count: int, events: int) -> None:
    times = [float(number) for number in range(events)]
    found = spread_tokens(count, times)
    assert len(found) == (count if events else 0)
    assert found == sorted(found)
    assert found[:1] == times[: min(1, count)]


@pytest.mark.parametrize("body", [None, {}, [], "", "   ", {"error": {}}, {"error": None, "message": "m"}])
def test_an_error_always_has_a_text(body: Any) -> None:
    assert error_text(body)
    assert len(error_text({"error": "x" * 5000})) <= 200


# ---- the command ----------------------------------------------------------------------------------------------------


def command(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve_command.add_command(parser.add_subparsers(), new_command)
    return parser.parse_args(["serve", *argv])


async def run_command(fake: Fake, *argv: str) -> int:
    """The command creates its own event loop, so it runs on a thread."""
    async with served(fake):
        return await asyncio.to_thread(serve_command.run, command("--url", fake.url + "/v1", *argv))


SMALL = ("--requests", "5", "--rate", "100", "--scale", "0.01", "--max-output", "3")


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    fake = Fake(plain)
    assert within(run_command(fake, *SMALL, "--json", str(out), "--vocab-size", "50")) == 0
    assert "first token" in capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert figures["summary"]["finished"] == 5
    assert figures["summary"]["model"] == "fish-1"
    assert figures["summary"]["scaled_by"] == 0.01
    assert len(figures["requests"]) == 5
    assert {body["model"] for body in fake.asked} == {"fish-1"}
    assert all(0 <= id < 50 for body in fake.asked for id in body["prompt"])


@pytest.mark.parametrize("flags", [("--chat",), ("--text", "--concurrency", "2"), ("--gamma-cv", "3", "--rate", "200")])
def test_the_command_prints_json(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake(plain)
    small = ("--requests", "4", "--scale", "0.01", "--max-output", "3", "--model", "mine", "--json", "-")
    rate = () if "--concurrency" in flags or "--rate" in flags else ("--rate", "100")
    assert within(run_command(fake, *small, *rate, *flags)) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["finished"] == 4
    assert {body["model"] for body in fake.asked} == {"mine"}
    if "--chat" in flags:
        assert all(isinstance(body["messages"][0]["content"], str) for body in fake.asked)


def test_the_command_replays_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,1\n2,6,2\n4,7,300\n")
    fake = Fake(plain)
    argv = ("--trace", str(trace), "--replay", "--time-scale", "0.05", "--max-output", "3", "--model", "m")
    assert within(run_command(fake, *argv)) == 0
    assert [(len(body["prompt"]), body["max_tokens"]) for body in fake.asked] == [(5, 1), (6, 2), (7, 3)]
    assert "33.3% of requests were shortened" in capsys.readouterr().out
    placed, _ = serve_command.requests_from(command(*argv))
    assert [one.at_s for one in placed] == pytest.approx([0, 0.1, 0.2])
    placed, _ = serve_command.requests_from(command("--trace", str(trace), "--replay", "--rate", "10"))
    assert [one.at_s for one in placed] == pytest.approx([0, 0.1, 0.2])


def test_the_command_fails_when_nothing_finished(capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake(plain, refuse=lambda fake, body: web.Response(status=503, text="later"))
    assert within(run_command(fake, *SMALL)) == 1
    assert "5 times http 503: later" in capsys.readouterr().out


def test_the_defaults_need_no_file() -> None:
    requests, capped = serve_command.requests_from(command())
    assert len(requests) == serve_command.REQUESTS
    assert capped == 0
    assert requests[-1].at_s == pytest.approx(serve_command.REQUESTS, rel=0.5)
    assert serve_command.requests_from(command("--seed", "1"))[0] != requests
    assert [replace(one, at_s=0) for one in requests] == serve_command.requests_from(command("--concurrency", "3"))[0]


@pytest.mark.parametrize(
    "argv",
    [
        ("--requests", "0"),
        ("--concurrency", "0"),
        ("--rate", "0"),
        ("--rate", "nan"),
        ("--scale", "-1"),
        ("--max-prompt", "0"),
        ("--timeout", "0"),
        ("--promise-ttft", "0"),
        ("--url", "nowhere"),
        ("--trace", "no-such-file.csv"),
        ("--json", "/no/such/folder/out.json"),
        ("--concurrency", "3", "--rate", "2"),
        ("--concurrency", "3", "--replay"),
        ("--replay",),
        ("--time-scale", "2"),
        ("--trace", "x.csv", "--replay", "--gamma-cv", "2"),
        ("--trace", "x.csv", "--replay", "--rate", "1", "--time-scale", "2"),
    ],
)
def test_what_the_command_refuses(argv: tuple[str, ...]) -> None:
    with pytest.raises(BadConfig) as caught:
        serve_command.run(command(*argv))
    assert (caught.type is ImpossiblePair) == (len(argv) != 2 or argv[0] == "--time-scale")


def test_no_server_to_ask_for_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadConfig, match="is the server running"):
        serve_command.run(command("--url", f"http://127.0.0.1:{free_port()}", *SMALL))


def test_a_server_without_a_list_of_models() -> None:
    async def ask(body: Any, status: int) -> str:
        async def answer(request: web.Request) -> web.Response:
            return web.json_response(body, status=status)

        app = web.Application()
        app.router.add_get("/v1/models", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await first_model(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    assert within(ask({"data": [{"id": "x"}]}, 200)) == "x"
    for body, status in (({}, 200), ({"data": []}, 200), ([], 200), ({"error": "no"}, 404)):
        with pytest.raises(BadConfig, match="--model"):
            within(ask(body, status))


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command("--help")
    assert left.value.code == 0
    output = capsys.readouterr().out
    for word in ("example:", "shoal bench serve --url", "--gamma-cv", "--promise-ttft", "--time-scale"):
        assert word in output
