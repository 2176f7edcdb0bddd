"""An answered request is freed at once: the garbage collector of a front runs rarely."""

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.keys.api_key import ApiKey, digest_of
from shoal.keys.ledger import Demand
from shoal.keys.ledger_client import LedgerClient, OpenReservation, Reservation
from shoal.server.app import Front
from shoal.server.jobs import Call
from shoal.server.response_store import SqliteStore
from tests.server.fake_client import FakeClient, until
from tests.server.fronts import ask, front, listening, raw_request, run

KEY = ApiKey(name="alice", digest=digest_of("sk-alice-key"))


class ReservesAll:
    """Every call is reserved, without a ledger."""

    async def reserve(self, tenant: str, demand: Demand) -> Reservation:
        return OpenReservation(cast(LedgerClient, Settles()), "call")


class Settles:
    def settle(self, call: str, used: int) -> None: ...


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            ("/v1/completions", {"prompt": "x", "max_tokens": 4, "stream": stream, "logprobs": logprobs})
            for stream in (False, True)
            for logprobs in (None, 3)
        ),
        *(
            ("/v1/responses", {"input": "x", "max_output_tokens": 4, **more})
            for more in ({}, {"stream": True}, {"background": True}, LOGPROBS, {"stream": True, **LOGPROBS})
        ),
        ("/v1/responses", {"input": "x", "max_output_tokens": 4, "stream": True, "background": True}),
        *(("/generate", {"text": "x", "stream": stream, "return_logprob": True}) for stream in (False, True)),
    ],
)
def test_a_call_does_not_outlive_its_answer(
    path: str, body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[weakref.ref[Call]] = []
    init = Call.__init__

    def noted(call: Call, *args: Any, **more: Any) -> None:
        calls.append(weakref.ref(call))
        init(call, *args, **more)

    monkeypatch.setattr(Call, "__init__", noted)
    store = SqliteStore(tmp_path / "responses.sqlite", 2**20, 100.0)
    app: Front = front(FakeClient(), api_keys=[KEY], limiter=ReservesAll(), store=store)
    gc.disable()
    try:
        answer = ask(app, "POST", path, json=body, headers={"authorization": "Bearer sk-alice-key"})
        assert answer.status_code == 200
        assert [call() for call in calls] == [None]
        assert store._memory.used == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_of_a_connection_is_left_to_the_collector(stream: bool, leaves: bool) -> None:
    """Neither of one whose answers were read, nor of one that was left before."""
    body = {"prompt": "x", "max_tokens": 10**6 if leaves else 4, "stream": stream, "ignore_eos": True}

    async def work() -> None:
        client = FakeClient(lambda job, sample: [50] * min(job.params.max_tokens or 1, 10**6), tick_s=0.001)
        app = front(client)
        async with listening(app) as port:
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                more = () if leaves else ("connection: close",)
                writer.write(raw_request("/v1/completions", body, *more))
                await (until(lambda: bool(client.running)) if leaves else reader.read())
                writer.close()
                await asyncio.gather(writer.wait_closed(), return_exceptions=True)
                await until(lambda: not client.running and not app.active)
        await asyncio.sleep(0)

    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        run(work)
        gc.collect()
        kinds = {type(one).__name__ for one in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not kinds & {"Exchange", "RequestResponseCycle", "Watcher", "Limited", "AnswerTransport", "Call"}
