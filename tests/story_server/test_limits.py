"""Who is let in and who is not: keys, queues, deadlines, draining, and an engine that dies."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, APIStatusError, AuthenticationError, RateLimitError

from tests.story_server.servers import (
    RESTARTS,
    RUNNING,
    SMALL,
    STOP_S,
    WAITING,
    Server,
    assert_error_shape,
    long_stream,
    running,
    tokens_in,
)

KEYS = ("sk-alpha-0123", "sk-beta-0123", "sk-gamma-0123", "sk-delta-0123")


# ---- keys -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Each key may have one request at a time and 6000 tokens a minute."""
    flags = [part for key in KEYS for part in ("--api-key", key)]
    flags += ["--key-max-concurrent", "1", "--key-tokens-per-minute", "6000"]
    with running(tmp_path_factory.mktemp("keyed"), tiny_model, *SMALL, *flags, key=KEYS[0]) as server:
        yield server


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", "Basic c2stYWxwaGE6", "sk-alpha-0123", "Bearer sk-alpha-012"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_without_a_good_key_it_is_a_401(keyed: Server, header: str | None, path: str) -> None:
    headers = {"Authorization": header} if header else {}
    answer = keyed.http.post(f"{keyed.url}{path}", json={"model": "tiny", "prompt": "x"}, headers=headers)
    assert answer.status_code == 401
    error = assert_error_shape(answer)
    assert not any(key in error["message"] for key in KEYS)


def test_a_key_with_odd_bytes_is_a_401(keyed: Server) -> None:
    headers = {b"Authorization": b"Bearer \xff\xfe"}
    answer = keyed.http.post(f"{keyed.url}/v1/completions", json={"model": "tiny", "prompt": "x"}, headers=headers)
    assert answer.status_code == 401


def test_health_needs_no_key_but_the_models_do(keyed: Server) -> None:
    assert keyed.http.get(f"{keyed.url}/health").status_code == 200
    assert keyed.http.get(f"{keyed.url}/v1/models").status_code == 401
    with keyed.openai("wrong") as client, pytest.raises(AuthenticationError):
        client.models.list()


def test_every_good_key_is_let_in(keyed: Server) -> None:
    for key in KEYS:
        with keyed.openai(key) as client:
            assert [model.id for model in client.models.list().data] == ["tiny"]
            assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices


def test_keys_are_not_in_the_log(keyed: Server) -> None:
    assert not any(key in keyed.log(10**9) for key in KEYS)


def test_a_key_has_so_many_requests_at_once(keyed: Server) -> None:
    alpha, beta, *_ = KEYS
    with long_stream(keyed, 4000, key=alpha) as events:
        refused = keyed.complete(max_tokens=1, key=alpha)
        assert refused.status_code == 429
        assert_error_shape(refused)
        assert keyed.complete(max_tokens=1, key=beta).status_code == 200, "one key's limit is not another's"
        goes_on(events)
    keyed.wait_until_idle()
    assert keyed.complete(max_tokens=1, key=alpha).status_code == 200, "its place is free again"


def test_a_key_has_so_many_tokens_a_minute(keyed: Server) -> None:
    *_, gamma, delta = KEYS
    statuses = []
    for i in range(6):
        answer = keyed.complete(prompt=[5 + i] * 1900, max_tokens=1, key=gamma)
        statuses.append(answer.status_code)
        if answer.status_code != 200:
            break
    assert statuses[:2] == [200, 200]
    assert statuses[-1] == 429, statuses
    assert len(statuses) <= 5, "6000 tokens are at most three such prompts, and one that was let in at the border"
    assert 1 <= float(answer.headers["retry-after"]) <= 60
    assert_error_shape(answer)
    assert keyed.complete(prompt=[5] * 1900, max_tokens=1, key=delta).status_code == 200


# ---- the queue and deadlines ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One runs, two wait."""
    flags = ("--max-num-seqs", "1", "--max-queue", "2")
    with running(tmp_path_factory.mktemp("narrow"), tiny_model, *SMALL, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def hasty(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One runs, others wait for a second, and so long may the rest take when it ends. The last test that uses it ends
    it."""
    flags = ("--max-num-seqs", "1", "--max-wait", "1", "--drain-timeout", "1")
    with running(tmp_path_factory.mktemp("hasty"), tiny_model, *SMALL, *flags) as server:
        yield server


@contextlib.contextmanager
def waiters(server: Server, count: int) -> Iterator[list[Any]]:
    """So many requests that wait; the list is what became of them, complete when the block is left."""
    became: list[Any] = []
    threads = [threading.Thread(target=lambda: became.append(server.complete(max_tokens=1))) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        server.wait_for(f"{count} waiting requests", lambda: server.metrics().get(WAITING) == count)
        yield became
    finally:
        for thread in threads:
            thread.join()


def goes_on(events: Iterator[dict[str, Any]]) -> None:
    """The one that runs is not disturbed."""
    for _ in range(100):
        assert next(events)["choices"][0]["finish_reason"] is None


def test_a_full_queue_is_a_429_with_retry_after(narrow: Server) -> None:
    with contextlib.ExitStack() as later, long_stream(narrow) as events:
        became = later.enter_context(waiters(narrow, 2))
        with narrow.openai() as client, pytest.raises(RateLimitError) as caught:
            client.completions.create(model="tiny", prompt=[5], max_tokens=1)
        assert float(caught.value.response.headers["retry-after"]) >= 1
        assert_error_shape(caught.value.response)
        goes_on(events)
    assert [answer.status_code for answer in became] == [200, 200], "they took the place of the one that hung up"
    narrow.wait_until_idle()


def test_a_stream_meets_a_full_queue_as_a_429_too(narrow: Server) -> None:
    with contextlib.ExitStack() as later, long_stream(narrow):
        later.enter_context(waiters(narrow, 2))
        answer = narrow.complete(max_tokens=1, stream=True)
        assert answer.status_code == 429
        assert_error_shape(answer)
    narrow.wait_until_idle()


def test_a_deadline_that_passes_in_the_queue_is_a_503(narrow: Server) -> None:
    with long_stream(narrow) as events:
        answer = narrow.complete(max_tokens=1, timeout=0.3)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert_error_shape(answer)
        goes_on(events)
        assert narrow.metrics().get(WAITING) == 0
    narrow.wait_until_idle()


def test_a_deadline_that_passes_while_it_runs_ends_it_with_what_it_has(narrow: Server) -> None:
    answer = narrow.complete(max_tokens=20_000, ignore_eos=True, timeout=1.0).json()
    assert answer["choices"][0]["finish_reason"] == "timeout"
    assert 0 < answer["usage"]["completion_tokens"] < 20_000
    narrow.wait_until_idle()


def test_a_deadline_ends_a_running_stream(narrow: Server) -> None:
    body = {"model": "tiny", "prompt": [5], "max_tokens": 20_000, "ignore_eos": True, "stream": True, "timeout": 1.0}
    answer = narrow.post("/v1/completions", body)
    assert answer.status_code == 200, "it had begun"
    assert '"finish_reason":"timeout"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    narrow.wait_until_idle()


def test_waiting_longer_than_max_wait_is_a_503(hasty: Server) -> None:
    with long_stream(hasty):
        answer = hasty.complete(max_tokens=1)
        assert answer.status_code == 503
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert_error_shape(answer)
    hasty.wait_until_idle()


def test_a_client_that_hangs_up_while_it_waits_leaves_the_queue(narrow: Server) -> None:
    with long_stream(narrow) as events:
        with pytest.raises(httpx.ReadTimeout):
            narrow.post("/v1/completions", {"model": "tiny", "prompt": [5]}, timeout_s=0.5)
        narrow.wait_for("an empty queue", lambda: narrow.metrics().get(WAITING) == 0)
        assert narrow.metrics().get(RUNNING) == 1
        goes_on(events)
    narrow.wait_until_idle()


def test_a_client_that_hangs_up_while_it_runs_frees_the_row(narrow: Server) -> None:
    body = {"model": "tiny", "prompt": [5], "max_tokens": 20_000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        narrow.post("/v1/completions", body, timeout_s=0.5)
    narrow.wait_until_idle()
    narrow.wait_for("a word in the log", lambda: "status=499" in narrow.log())
    with long_stream(narrow):
        pass
    narrow.wait_for("a word in the log", lambda: "gone=True" in narrow.log())


# ---- an engine that dies --------------------------------------------------------------------------------------------


def test_a_killed_engine_comes_back(narrow: Server) -> None:
    with long_stream(narrow, 300) as events:
        want = tokens_in(events)
    with long_stream(narrow, 300) as events:
        (engine,) = narrow.engine_pids()
        os.kill(engine, signal.SIGKILL)
        narrow.wait_for("/health to say 503", lambda: narrow.health() == 503)
        waited = narrow.complete(max_tokens=1)
        assert waited.status_code in (200, 503), "answered, unless the stream took longer than the longest wait"
        assert tokens_in(events) == want, "the stream goes on as if nothing had happened"
    narrow.wait_for("/health to say 200 again", lambda: narrow.health() == 200)
    assert narrow.complete(max_tokens=4, ignore_eos=True).json()["usage"]["completion_tokens"] == 4
    assert narrow.engine_pids() != [engine]
    assert narrow.metrics()[RESTARTS] == 1
    narrow.wait_until_idle()


# ---- draining -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fronts_share_the_work(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, *SMALL, "--api-workers", "2") as server:
        assert all(server.complete(max_tokens=2, ignore_eos=True).status_code == 200 for _ in range(40))
        server.wait_until_idle()
        assert server.metrics()["shoal_requests_finished_total"] == 40


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_https(tiny_model: Path, tmp_path: Path) -> None:
    made = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost"
    subprocess.run(made.split(), cwd=tmp_path, check=True, capture_output=True)
    flags = ("--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem"))
    with running(tmp_path, tiny_model, *SMALL, *flags) as server:
        assert server.url.startswith("https://")
        assert server.health() == 200


def is_refused(server: Server) -> bool:
    try:
        return (
            server.http.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": [5]}).status_code == 503
        )
    except httpx.TransportError:
        return True


def test_sigterm_lets_running_requests_finish(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, *SMALL) as server, server.openai() as before:
        assert before.completions.create(model="tiny", prompt=[5], max_tokens=1).choices  # a connection kept open
        with long_stream(server, 700) as events:
            server.terminate()
            server.wait_for("new requests to be refused", lambda: is_refused(server))
            with pytest.raises(APIError) as caught:
                before.completions.create(model="tiny", prompt=[5], max_tokens=1)
            assert getattr(caught.value, "status_code", 503) == 503
            rest = list(events)  # up to [DONE], or it raises
        assert len(tokens_in(iter(rest))) == 700
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert server.stop() == 0


def test_the_drain_timeout_cuts_what_still_runs(hasty: Server) -> None:
    with long_stream(hasty, 30_000) as events:
        hasty.terminate()
        came = 0
        with contextlib.suppress(EOFError, httpx.TransportError):
            for _ in events:
                came += 1
        assert came < 29_000
    assert hasty.stop() == 0


@pytest.mark.slow
def test_control_c_ends_it_as_well(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, *SMALL) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(STOP_S) in (0, 130)
        server.wait_until_family_is_gone()
        assert "Traceback" not in server.log(10**9)
        server.forget()


@pytest.mark.slow
def test_a_killed_front_leaves_no_engine_behind(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, *SMALL) as server:
        server.process.kill()
        server.process.wait(STOP_S)
        server.wait_until_family_is_gone()
        server.forget()


# ---- flags, files, variables ----------------------------------------------------------------------------------------


def serve(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A start that must fail before anything heavy is loaded."""
    return subprocess.run(
        [sys.executable, "-m", "shoal", "serve", *flags],
        capture_output=True,
        text=True,
        timeout=STOP_S,
        env={**os.environ, **env},
        check=False,
    )


def test_an_unknown_flag_is_an_error() -> None:
    done = serve("--max-num-seqz", "5")
    assert done.returncode == 2
    assert "max-num-seqz" in done.stderr


def test_an_unknown_key_in_the_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "shoal.yaml").write_text("port: 0\nmax_num_seqz: 5\n")
    done = serve("--config", str(tmp_path / "shoal.yaml"))
    assert done.returncode != 0
    assert "max_num_seqz" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_variable_is_an_error() -> None:
    done = serve("--port", "0", SHOAL_MAX_NUM_SEQZ="5")
    assert done.returncode != 0
    assert "SHOAL_MAX_NUM_SEQZ" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    done = serve(str(tmp_path / "nowhere"), "--port", "0")
    assert done.returncode != 0
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_an_error(narrow: Server, tiny_model: Path) -> None:
    done = serve(str(tiny_model), *SMALL, "--port", narrow.url.rpartition(":")[2])
    assert done.returncode != 0
    assert narrow.url.rpartition(":")[2] in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_and_variables_are_heard_and_flags_win(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "shoal.yaml").write_text("served_model_name: from-file\nmax_model_len: 77\nmax_queue: 5\n")
    small = SMALL[: SMALL.index("--served-model-name")]
    flags = (*small, "--config", str(tmp_path / "shoal.yaml"), "--max-model-len", "99")
    with running(tmp_path / "logs", tiny_model, *flags, env={"SHOAL_API_KEY": "from-variable"}) as server:
        assert server.http.get(f"{server.url}/v1/models").status_code == 401
        with server.openai("from-variable") as client:
            assert [model.id for model in client.models.list().data] == ["from-file"]
            with pytest.raises(APIStatusError, match="99"):
                client.completions.create(model="from-file", prompt=[5] * 200)
