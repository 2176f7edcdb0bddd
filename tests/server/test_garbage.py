"""An answered request is freed at once: the garbage collector of a front runs rarely."""

import gc
import weakref
from typing import Any, cast

import pytest

from shoal.keys.api_key import ApiKey, digest_of
from shoal.keys.ledger import Demand
from shoal.keys.ledger_client import LedgerClient, OpenReservation, Reservation
from shoal.server.app import Front
from shoal.server.jobs import Call
from tests.server.fake_client import FakeClient
from tests.server.fronts import ask, front

KEY = ApiKey(name="alice", digest=digest_of("sk-alice-key"))


class ReservesAll:
    """Every call is reserved, without a ledger."""

    async def reserve(self, tenant: str, demand: Demand) -> Reservation:
        return OpenReservation(cast(LedgerClient, Settles()), "call")


class Settles:
    def settle(self, call: str, used: int) -> None: ...


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 3])
def test_a_call_does_not_outlive_its_answer(
    stream: bool, logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[weakref.ref[Call]] = []
    init = Call.__init__

    def noted(call: Call, *args: Any, **more: Any) -> None:
        calls.append(weakref.ref(call))
        init(call, *args, **more)

    monkeypatch.setattr(Call, "__init__", noted)
    app: Front = front(FakeClient(), api_keys=[KEY], limiter=ReservesAll())
    body = {"prompt": "x", "max_tokens": 4, "stream": stream, "logprobs": logprobs}
    gc.collect()
    gc.disable()
    try:
        answer = ask(app, "POST", "/v1/completions", json=body, headers={"authorization": "Bearer sk-alice-key"})
        assert answer.status_code == 200
        assert [call() for call in calls] == [None]
    finally:
        gc.enable()
