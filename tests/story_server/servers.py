"""Real `shoal serve` processes for the tests: started, asked, watched and stopped from outside.

Knows what a user knows: flags, URLs, metric names and signals. Knows nothing of the server's insides.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI
from prometheus_client.parser import text_string_to_metric_families

READY = re.compile(r"https?://127\.0\.0\.1:([1-9][0-9]*)")
SMALL = ("--dtype", "float32", "--kv-memory", "64MiB", "--threads", "1", "--served-model-name", "tiny", "--depth", "2")
SMALL += ("--no-spare-engine",)  # loading one takes seconds of CPU time, which most tests do not need
START_S, STOP_S, SETTLE_S = 120.0, 60.0, 120.0  # far more than needed: a hang must fail, a slow machine must not
# the metrics these tests lean on
RUNNING, WAITING, HELD = "shoal_requests_running", "shoal_requests_waiting", "shoal_kv_blocks_held"
RESTARTS = "shoal_engine_restarts_total"
STARTED: "list[Server]" = []


class Server:
    """One `shoal serve` and all its processes."""

    def __init__(self, folder: Path, model: str | Path | None, *flags: str, env: dict[str, str] | None = None) -> None:
        self.logs = [folder / "stdout.log", folder / "stderr.log"]
        command = [sys.executable, "-m", "shoal", "serve", *([str(model)] if model else [])]
        command += ["--host", "127.0.0.1", "--port", "0", *flags]
        with self.logs[0].open("wb") as out, self.logs[1].open("wb") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )
        self.http = httpx.Client(timeout=120, verify=False)  # reading certificates for every request takes longer
        self.family: set[int] = set()
        self.key: str | None = None  # for what the server does not tell everybody
        STARTED.append(self)
        try:
            self.url = self._wait_for_url()
            self.first_health = self.health()
            self.wait_for("GET /health to answer 200", lambda: self.health() == 200, START_S)
        except BaseException:
            self.kill()
            raise
        self.family = family_of(self.process.pid)

    def _wait_for_url(self) -> str:
        found: list[str] = []

        def printed() -> bool:
            found.extend(match[0] for match in READY.finditer(self.logs[0].read_text(errors="replace")))
            return bool(found)

        self.wait_for("its address on standard output", printed, START_S)
        return found[0]

    def wait_for(self, what: str, came: Callable[[], bool], limit_s: float = SETTLE_S) -> None:
        end_s = time.monotonic() + limit_s
        while not came():
            code = self.process.poll()
            assert code is None, f"the server ended with code {code} while waiting for {what}\n{self.log()}"
            assert time.monotonic() < end_s, f"waited {limit_s:g} s in vain for {what}\n{self.log()}"
            time.sleep(0.03)

    def log(self, last: int = 2500) -> str:
        parts = [f"--- {path.name}\n{path.read_text(errors='replace')[-last:]}" for path in self.logs if path.exists()]
        return "\n".join(parts)

    # ---- asking it ----

    def health(self) -> int:
        """The status of /health; 0 when nobody answers."""
        try:
            return self.http.get(f"{self.url}/health").status_code
        except httpx.TransportError:
            return 0

    def openai(self, key: str = "none") -> OpenAI:
        http = DefaultHttpxClient(verify=False)
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120, http_client=http)

    def async_openai(self, key: str = "none") -> AsyncOpenAI:
        http = DefaultAsyncHttpxClient(verify=False)
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120, http_client=http)

    def post(self, path: str, body: Any, key: str | None = None, timeout_s: float = 120) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.http.post(f"{self.url}{path}", json=body, headers=headers, timeout=timeout_s)

    def complete(self, **body: Any) -> httpx.Response:
        key = body.pop("key", None)
        return self.post("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], **body}, key)

    def metrics(self) -> dict[str, float]:
        """Every sample without its labels, summed."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        answer = self.http.get(f"{self.url}/metrics", headers=headers)
        assert answer.status_code == 200, answer.text
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def wait_until_idle(self) -> None:
        """Nobody runs, nobody waits, no block is held."""

        def idle() -> bool:
            now = self.metrics()
            return now.get(RUNNING) == now.get(WAITING) == now.get(HELD) == 0

        self.wait_for("zero running, zero waiting and zero blocks held", idle)

    # ---- its processes ----

    def front_pids(self) -> list[int]:
        return [pid for pid in family_of(self.process.pid) if "shoal.processes.front" in command_of(pid)]

    def engine_pids(self) -> list[int]:
        """Without the spare one, which runs the same command."""
        return [pid for pid in family_of(self.process.pid) if name_of(pid) == "shoal-engine"]

    def end_engine(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Signals a process of the engine, as from outside; returns when the next engine answers.

        A front may not have noticed yet that the old one is gone, and says 200: so it must have seen the new one.
        """
        before = self.metrics()[RESTARTS]
        os.kill(pid, number)
        self.wait_for("another engine", lambda: self.metrics()[RESTARTS] > before)
        self.wait_for("/health to say 200 again", lambda: self.health() == 200)

    def kill_engine(self) -> None:
        (pid,) = self.engine_pids()
        self.end_engine(pid)

    def spare_pids(self) -> list[int]:
        return [pid for pid in family_of(self.process.pid) if name_of(pid) == "shoal-spare"]

    def resident_bytes(self) -> int:
        return sum(resident_bytes(pid) for pid in family_of(self.process.pid))

    def terminate(self) -> None:
        self.family |= family_of(self.process.pid)
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """SIGTERM, the exit code, and a look that no process of it was left behind."""
        if self.process.poll() is None:
            self.terminate()
        try:
            code = self.process.wait(STOP_S)
            self.wait_until_family_is_gone()
        except (subprocess.TimeoutExpired, AssertionError):
            self.kill()
            raise
        self.forget()
        return code

    def forget(self) -> None:
        """It has ended."""
        self.http.close()
        STARTED.remove(self)

    def wait_until_family_is_gone(self, limit_s: float = 20) -> None:
        end_s = time.monotonic() + limit_s
        while left := {pid: command_of(pid) for pid in self.family if command_of(pid)}:
            assert time.monotonic() < end_s, f"processes left behind: {left}\n{self.log()}"
            time.sleep(0.05)

    def kill(self) -> None:
        """The last resort: only what this object started."""
        for pid in self.family | (family_of(self.process.pid) if self.process.poll() is None else set()):
            if "shoal" in command_of(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        if self in STARTED:
            self.forget()


@contextmanager
def running(
    folder: Path, model: str | Path | None, *flags: str, env: dict[str, str] | None = None, key: str | None = None
) -> Iterator[Server]:
    """A server for the length of a block; SIGTERM must end it with code 0."""
    folder.mkdir(parents=True, exist_ok=True)
    server = Server(folder, model, *flags, env=env)
    server.key = key
    try:
        yield server
    except BaseException:
        server.kill()
        raise
    if server in STARTED:
        code = server.stop()
        assert code == 0, f"exit code {code} after SIGTERM\n{server.log()}"


# ---- processes, from /proc ----


def family_of(root: int) -> set[int]:
    """A process and everything below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue  # it ended while we looked
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def command_of(pid: int) -> str:
    """The command line; nothing for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


# ---- streams, read by hand ----


def lines_of(answer: httpx.Response) -> Iterator[str]:
    """The lines of a stream. httpx's own would also end them at U+2028 and the like, which JSON leaves as they are."""
    rest = b""
    for piece in answer.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode() for line in lines)


async def async_lines_of(answer: httpx.Response) -> AsyncIterator[str]:
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode()


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event up to [DONE], which must come."""
    for line in lines:
        if line.startswith("data: "):
            if line == "data: [DONE]":
                return
            yield json.loads(line.removeprefix("data: "))
    raise EOFError("the stream ended without data: [DONE]")


@contextmanager
def long_stream(server: Server, max_tokens: int = 20_000, key: str | None = None) -> Iterator[Iterator[dict[str, Any]]]:
    """A stream whose first token has come and that would go on for long; leaving the block hangs up."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": max_tokens, "seed": 1}
    body.update(ignore_eos=True, stream=True, return_token_ids=True)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=120, verify=False) as answer:
        assert answer.status_code == 200, answer.read()
        events = events_of(lines_of(answer))
        seen = []
        while not any(choice.get("token_ids") for event in seen for choice in event["choices"]):
            seen.append(next(events))
        yield chain(seen, events)


def tokens_in(events: Iterator[dict[str, Any]]) -> list[int]:
    """The token ids of a stream that was asked to return them."""
    return [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or []]


def raw_request(path: str, body: bytes, method: str = "POST", kind: str = "application/json", **more: str) -> bytes:
    headers = {"Host": "localhost", "Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in {**headers, **more}.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode() + body


def connect(server: Server, receive_buffer: int | None = None) -> socket.socket:
    made = socket.socket()
    if receive_buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(60)
    host, port = server.url.removeprefix("http://").split(":")
    made.connect((host, int(port)))
    return made


# ---- errors ----


def assert_error_shape(answer: Any) -> dict[str, Any]:
    """What an HTTP client got is OpenAI's {"error": {"message", "type", "param", "code"}}; returns the inner part."""
    assert answer.headers["content-type"].startswith("application/json"), (answer.status_code, answer.text)
    body = answer.json()
    assert set(body) == {"error"}, body
    assert {"message", "type", "param", "code"} <= set(body["error"]), body
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    assert "Traceback" not in body["error"]["message"]
    return body["error"]
