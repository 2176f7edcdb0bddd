"""A key's limits and rights as a front applies them: what a call is charged for, however it ends."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shoal.core.clock import VirtualClock
from shoal.core.job import Refusal
from shoal.errors import LedgerDown
from shoal.keys.api_key import ApiKey, digest_of
from shoal.keys.ledger import Demand, Ledger
from shoal.keys.ledger_client import Reservation
from shoal.keys.limits import TenantLimits
from shoal.obs.metrics import FrontMetrics
from shoal.server.app import Front
from tests.server.fake_client import FakeClient, until
from tests.server.fronts import ask, ask_async, error_of, front, run

KEY = ApiKey(name="alice", digest=digest_of("sk-alice-key"))
CHIEF = ApiKey(name="chief", digest=digest_of("sk-chief-key"), may_set_priority=True)
HEADERS = {"authorization": "Bearer sk-alice-key"}


class NearLedger:
    """A ledger in the same process, on a clock that stands still; remembers what was asked and settled."""

    def __init__(self, limits: TenantLimits) -> None:
        self.ledger = Ledger(lambda tenant: limits)
        self.clock = VirtualClock()
        self.demands: list[Demand] = []
        self.settled: list[int] = []
        self.running: list[Any] = []
        self.down = False

    async def reserve(self, tenant: str, demand: Demand) -> Reservation:
        if self.down:
            raise LedgerDown("the limits of this API key cannot be checked; try again soon", 5.0)
        id = str(len(self.demands))
        self.ledger.reserve("front", id, tenant, demand, self.clock.now_s())
        self.demands.append(demand)
        return NearReservation(self, id)


class NearReservation(Reservation):
    def __init__(self, near: NearLedger, id: str) -> None:
        self.near, self.id, self.open = near, id, True

    def follow(self, used: Any) -> None:
        self.near.running.append(used)

    def settle(self, used: int) -> None:
        if self.open:
            self.open = False
            self.near.ledger.settle("front", self.id, used, self.near.clock.now_s())
            self.near.settled.append(used)


@pytest.fixture
def near() -> Iterator[NearLedger]:
    made = NearLedger(TenantLimits(max_concurrent=4, tokens_per_minute=100))
    yield made
    assert len(made.settled) == len(made.demands), "a reservation was left open"


def make(near: NearLedger, client: FakeClient | None = None, **more: Any) -> Front:
    return front(client, api_keys=[KEY, CHIEF], limiter=near, **more)


def complete(app: Front, **body: Any) -> httpx.Response:
    return ask(app, "POST", "/v1/completions", json=body, headers=HEADERS)


# ---- what a call asks for, and what it pays -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_reserves_what_it_can_use_and_pays_for_what_it_used(near: NearLedger, stream: bool) -> None:
    body = {"prompt": [[5, 6, 7], [8]], "n": 2, "max_tokens": 9, "stream": stream, "ignore_eos": True}
    answer = complete(make(near), **body)
    assert answer.status_code == 200
    assert near.demands == [Demand(prompt_tokens=4, samples=4, output_tokens=36)]
    assert near.settled == [4 + 2 * (3 + 1)], "the fake engine repeats the prompt"


def test_without_max_tokens_a_call_may_fill_the_context(near: NearLedger) -> None:
    answer = ask(
        make(near),
        "POST",
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hi"}]},
        headers=HEADERS,
    )
    prompt = answer.json()["usage"]["prompt_tokens"]
    assert near.demands == [Demand(prompt, 1, 512 - prompt)]


def test_what_the_engine_refuses_costs_nothing(near: NearLedger) -> None:
    client = FakeClient()
    client.refusal = Refusal("QueueFull", "too many wait", 2.0)
    assert complete(make(near, client), prompt=[5, 6]).status_code == 429
    client = FakeClient()
    client.submit = lambda job, sink: (_ for _ in ()).throw(LedgerDown("gone"))  # type: ignore[method-assign]
    assert complete(make(near, client), prompt=[5, 6]).status_code == 503
    assert near.settled == [0, 0]


def test_a_request_whose_own_timeout_passed_pays_for_its_prompt(near: NearLedger) -> None:
    """The engine may have computed it: else a key could have prompts computed for nothing."""
    client = FakeClient()
    client.refusal = Refusal("DeadlinePassed", "too late", 2.0)
    assert complete(make(near, client), prompt=[5, 6], timeout=1.0).status_code == 503
    assert complete(make(near, client), prompt=[5, 6]).status_code == 503  # --max-wait: it never started
    assert near.settled == [2, 0]


def test_who_hangs_up_pays_for_the_prompt_and_what_came(near: NearLedger) -> None:
    async def work() -> None:
        client = FakeClient(lambda job, sample: [9] * 100, tick_s=None)
        app = make(near, client)
        body = {"prompt": [5, 6, 7], "max_tokens": 50, "stream": True, "ignore_eos": True}
        asking = asyncio.create_task(ask_async(app, "POST", "/v1/completions", json=body, headers=HEADERS))
        await until(lambda: bool(client.running))
        assert near.running[0]() == 0, "nothing is charged while it waits"
        client.tick()
        client.tick()
        assert near.running[0]() == 3 + 2
        (call,) = app.calls
        call.disconnected()
        with contextlib.suppress(AssertionError):  # httpx misses the end of the answer
            await asking

    run(work)
    assert near.settled == [5]


@pytest.mark.parametrize("stream", [False, True])
def test_a_place_is_free_before_the_client_has_its_answer(near: NearLedger, stream: bool) -> None:
    app = make(near)
    settled: list[int] = []  # reservations, when the last bytes are sent

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                settled.append(len(near.settled))
            await send(message)

        await app(scope, receive, noted)

    answer = complete(watched, prompt=[5], max_tokens=3, stream=stream)  # type: ignore[arg-type]
    assert answer.status_code == 200
    assert settled == [1]


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_beyond_the_limit_it_is_a_429_with_retry_after_and_counted(near: NearLedger) -> None:
    app = make(near, metrics=FrontMetrics())
    assert complete(app, prompt=[5] * 60, max_tokens=20).status_code == 200
    answer = complete(app, prompt=[5] * 90, max_tokens=1)
    assert "100 tokens per minute" in error_of(answer, 429)["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert app.client.submitted[-1].prompt == [5] * 60, "it never reached the engine"  # type: ignore[attr-defined]
    metrics = ask(app, "GET", "/metrics", headers=HEADERS).text
    assert 'shoal_limit_rejections_total{front="front-0",kind="RateLimited"} 1.0' in metrics


def test_more_prompts_than_places_are_a_400(near: NearLedger) -> None:
    error = error_of(complete(make(near), prompt=[[5]] * 5, max_tokens=1), 400)
    assert "is 5, but this key may have 4 requests at once" in error["message"]
    assert error["param"] == "n"


def test_a_ledger_that_is_away_is_a_503_with_retry_after(near: NearLedger) -> None:
    near.down = True
    app = make(near, metrics=FrontMetrics())
    answer = complete(app, prompt=[5])
    assert error_of(answer, 503)["code"] == "ledger_down"
    assert answer.headers["retry-after"] == "5"
    assert 'kind="LedgerDown"} 1.0' in ask(app, "GET", "/metrics", headers=HEADERS).text


def test_a_server_without_keys_asks_no_ledger(near: NearLedger) -> None:
    app = front(limiter=near)
    assert complete(app, prompt=[5] * 200, max_tokens=1).status_code == 200
    assert ask(app, "POST", "/tokenize", json={"prompt": "x" * 5000}).status_code == 200
    assert near.demands == []


# ---- /tokenize ------------------------------------------------------------------------------------------------------


def test_tokenized_tokens_count_against_the_limit(near: NearLedger) -> None:
    app = make(near)
    body = {"prompt": "fish " * 60}
    answer = ask(app, "POST", "/tokenize", json=body, headers=HEADERS)
    assert near.settled == [answer.json()["count"]]
    assert near.settled[0] > 50
    refused = ask(app, "POST", "/tokenize", json=body, headers=HEADERS)
    error_of(refused, 429)
    assert int(refused.headers["retry-after"]) >= 1
    error_of(ask(app, "POST", "/tokenize", json={"messages": []}, headers=HEADERS), 400)
    near.clock.advance(3600.0)
    bad = {"messages": [{"role": "user"}]}
    error_of(ask(app, "POST", "/tokenize", json=bad, headers=HEADERS), 400)
    assert near.settled[1:] == [0], "what fails is returned"


# ---- rights ---------------------------------------------------------------------------------------------------------


def test_a_priority_needs_a_right_in_the_key(near: NearLedger) -> None:
    app = make(near)
    for priority in (-1, 1):
        error = error_of(complete(app, prompt=[5], max_tokens=1, priority=priority), 403)
        assert (error["param"], error["code"]) == ("priority", "priority_not_allowed")
        assert "may_set_priority: true" in error["message"]
    for priority in (0, None):
        assert complete(app, prompt=[5], max_tokens=1, priority=priority).status_code == 200
    headers = {"authorization": "Bearer sk-chief-key"}
    body = {"prompt": [5], "max_tokens": 1, "priority": -7}
    assert ask(app, "POST", "/v1/completions", json=body, headers=headers).status_code == 200
    assert app.client.submitted[-1].priority == -7  # type: ignore[attr-defined]


def test_a_server_without_keys_takes_any_priority() -> None:
    app = front()
    assert complete(app, prompt=[5], max_tokens=1, priority=3).status_code == 200
