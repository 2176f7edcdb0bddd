"""What a key may use, on a real server with two fronts: within any time, and across the deaths of engine and fronts.

Every bound is computed from the time that has really passed, so a slow machine changes none of them.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.keys.api_key import ApiKey, digest_of
from shoal.keys.file import line_of
from shoal.keys.ledger import DEBT_MINUTES
from tests.processes.stopping import stop
from tests.story_server.servers import SMALL, Server, assert_error_shape, long_stream, running, tokens_in

LIMIT = 60  # tokens a minute: one each second
NAMES = ("issue", "stream", "engine", "front", "reader")  # keys with this limit
REJECTED = "shoal_limit_rejections_total"


def key(name: str) -> str:
    return f"sk-{name}-0123"


def api_key(name: str, **more: Any) -> ApiKey:
    return ApiKey(name=name, digest=digest_of(key(name)), **more)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ledger")
    keys = [api_key(name, tokens_per_minute=LIMIT) for name in NAMES]
    keys += [api_key("lone", max_concurrent=1), api_key("four", max_concurrent=4), api_key("free")]
    keys += [api_key("chief", may_set_priority=True)]
    (folder / "keys.yaml").write_text("\n".join(map(line_of, keys)))
    flags = ("--api-keys-file", str(folder / "keys.yaml"), "--api-workers", "2")
    with running(folder, tiny_model, *SMALL, *flags, key=key("free")) as made:
        yield made


def generate(server: Server, name: str, tokens: int, **more: Any) -> httpx.Response:
    """Three prompt tokens and exactly so many of output."""
    return server.complete(max_tokens=tokens, ignore_eos=True, key=key(name), **more)


def assert_in_debt(answer: httpx.Response, used: int, since_s: float) -> None:
    """Refused until what was used is paid for, of which one token leaks out each second."""
    assert answer.status_code == 429, answer.text
    assert f"{LIMIT} tokens per minute" in assert_error_shape(answer)["message"]
    left = used - LIMIT - (time.monotonic() - since_s)
    assert left > 0, "this took so long that nothing can be said"
    assert left <= int(answer.headers["retry-after"]) <= used + LIMIT


# ---- tokens per minute ----------------------------------------------------------------------------------------------


def test_however_much_a_key_asks_for_it_gets_at_most_the_bound(server: Server) -> None:
    """Today's limit counted the prompts alone, and each of these streams would have run."""
    began_s = time.monotonic()
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.extend(generate(server, "issue", 400) for _ in range(6))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    minutes = (time.monotonic() - began_s) / 60
    used = sum(answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200)
    assert 403 <= used <= minutes * LIMIT + LIMIT + max(DEBT_MINUTES * LIMIT, 403)
    refused = [answer for answer in answers if answer.status_code != 200]
    for answer in refused:
        assert answer.status_code == 429, answer.text
        assert int(answer.headers["retry-after"]) >= 1
    server.wait_for("both fronts' refusals to be counted", lambda: server.metrics()[REJECTED] == len(refused))


def test_a_running_stream_is_never_cut_but_paid_for_afterwards(server: Server) -> None:
    began_s = time.monotonic()
    with long_stream(server, 1500, key=key("stream")) as events:
        beside = generate(server, "stream", 10)
        assert beside.status_code == 429
        assert int(beside.headers["retry-after"]) >= 1
        assert len(tokens_in(events)) == 1500
    assert_in_debt(generate(server, "stream", 1), 1503, began_s)
    assert generate(server, "free", 10).status_code == 200


def test_samples_that_could_never_be_paid_for_are_a_400(server: Server) -> None:
    answer = generate(server, "issue", 400, n=2)
    assert answer.status_code == 400
    assert "lower max_tokens" in assert_error_shape(answer)["message"]


def test_a_killed_engine_refills_nothing(server: Server) -> None:
    began_s = time.monotonic()
    assert generate(server, "engine", 1000).status_code == 200
    assert_in_debt(generate(server, "engine", 1), 1003, began_s)
    server.kill_engine()
    assert generate(server, "free", 1).status_code == 200
    assert_in_debt(generate(server, "engine", 1), 1003, began_s)


def test_killed_fronts_refill_nothing_and_keep_no_place(server: Server) -> None:
    began_s = time.monotonic()
    assert generate(server, "front", 1000).status_code == 200
    assert_in_debt(generate(server, "front", 1), 1003, began_s)
    with long_stream(server, key=key("lone")):
        assert generate(server, "lone", 1).status_code == 429
        for pid in server.front_pids():
            os.kill(pid, signal.SIGKILL)
        server.wait_for("/health to say 200 again", lambda: server.health() == 200)

        answered(server, "lone", 200)  # the place of a stream that died with its front
    assert_in_debt(answered(server, "front", 429), 1003, began_s)


def answered(server: Server, name: str, status: int) -> httpx.Response:
    """The answer of this status, asked for until it comes: a front that was just started may not answer yet."""
    answers: list[httpx.Response] = []

    def came() -> bool:
        with contextlib.suppress(httpx.TransportError):
            answers.append(generate(server, name, 1))
        return bool(answers) and answers[-1].status_code == status

    server.wait_for(f"the status {status}", came)
    return answers[-1]


def test_tokenized_texts_count(server: Server) -> None:
    began_s = time.monotonic()
    body = {"prompt": "the fish swims " * 400}
    answer = server.post("/tokenize", body, key=key("reader"))
    assert answer.status_code == 200
    used = answer.json()["count"]
    assert used > 400
    refused = server.post("/tokenize", {"prompt": "fish"}, key=key("reader"))
    assert refused.status_code == 429
    assert used - LIMIT - (time.monotonic() - began_s) <= int(refused.headers["retry-after"])
    assert_in_debt(generate(server, "reader", 1), used, began_s)
    assert server.post("/tokenize", body, key=key("free")).status_code == 200


# ---- at once --------------------------------------------------------------------------------------------------------


def test_more_prompts_than_the_key_may_ever_have_are_a_400(server: Server) -> None:
    prompts = [[5, 6, number] for number in range(5)]
    answer = server.complete(prompt=prompts, max_tokens=1, key=key("four"))
    assert answer.status_code == 400
    assert "is 5, but this key may have 4 requests at once" in assert_error_shape(answer)["message"]
    assert server.complete(prompt=prompts[:4], max_tokens=1, key=key("four")).status_code == 200
    assert server.complete(prompt=prompts[:2], n=2, max_tokens=1, key=key("four")).status_code == 200


# ---- rights ---------------------------------------------------------------------------------------------------------


def test_a_priority_needs_a_right_in_the_key(server: Server) -> None:
    refused = generate(server, "free", 1, priority=-1)
    assert refused.status_code == 403
    error = assert_error_shape(refused)
    assert error["param"] == "priority"
    assert "may_set_priority: true" in error["message"]
    assert generate(server, "free", 1, priority=0).status_code == 200
    assert generate(server, "chief", 1, priority=-1).status_code == 200


# ---- a ledger that does not answer ----------------------------------------------------------------------------------


def test_without_the_ledger_limited_keys_get_a_503_and_others_are_served(server: Server) -> None:
    assert generate(server, "four", 1).status_code == 200
    stop(server.process.pid)
    try:
        refused = generate(server, "four", 1)
        assert refused.status_code == 503
        assert assert_error_shape(refused)["code"] == "ledger_down"
        assert int(refused.headers["retry-after"]) >= 1
        assert generate(server, "free", 1).status_code == 200
    finally:
        server.process.send_signal(signal.SIGCONT)
    took_a_place = "what was asked in vain still has its place"
    server.wait_for(took_a_place, lambda: generate(server, "four", 1, n=4).status_code == 200)
