"""The Ray Serve application `shoal.cluster:app`, for deployments with `serve run`.

One replica of one deployment runs `shoal serve --cluster ray` as a child process on its node and passes HTTP through to
it, bytes as they come. Its options are arguments of the application, by the names of Shoal's flags. Owns the child
and the passing on; knows nothing of what the requests are.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import ray
from ray import serve
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from shoal.errors import BadConfig

STOP_S = 60.0
# headers that concern one connection alone
HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length")
)
OPTION = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
FIXED = frozenset(("cluster", "cluster_address", "host", "port", "ssl_certfile", "ssl_keyfile"))


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """The command line of `shoal serve` for these options.

    >>> flags_of({"model": "org/model", "max_replicas": 4, "log-prompts": True})
    ['org/model', '--max-replicas=4', '--log-prompts']
    """
    flags: list[str] = []
    for key, value in options.items():
        name = key.replace("-", "_")
        if not OPTION.fullmatch(name) or name in FIXED:
            raise BadConfig(
                f"{key!r} cannot be an option of shoal.cluster:app; it takes the flags of shoal serve but "
                f"{', '.join('--' + one.replace('_', '-') for one in sorted(FIXED))}"
            )
        flag = f"--{name.replace('_', '-')}"
        if name == "model":
            flags.insert(0, str(value))
        elif isinstance(value, bool):
            flags += [flag] if value else []
        else:
            flags += [f"{flag}={one}" for one in (value if isinstance(value, list | tuple) else [value])]
    return flags


@serve.deployment(name="shoal", num_replicas=1, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0.5})
class ShoalServer:
    """A Shoal server behind Ray Serve's proxies. Its health is the server's."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        command = [sys.executable, "-m", "shoal", "serve", *flags_of(options)]
        address = ray.get_runtime_context().gcs_address
        command += ["--cluster", "ray", "--cluster-address", address, "--host", "127.0.0.1", "--port", "0", "--json"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self._session: aiohttp.ClientSession | None = None
        self._url = self._wait_for_url()

    def _wait_for_url(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):
                return str(json.loads(line)["url"])
        raise BadConfig(f"shoal serve ended with code {self._process.wait()}; the reason is in this replica's log")

    async def check_health(self) -> None:
        """Ray Serve replaces a replica whose server has ended. Engines that are down are restarted by the server."""
        if self._process.poll() is not None:
            raise RuntimeError(f"shoal serve ended with code {self._process.returncode}")

    def __del__(self) -> None:
        if hasattr(self, "_process") and self._process.poll() is None:
            self._process.terminate()  # drains; its engines end with it
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    async def __call__(self, request: Request) -> Response:
        """Pass a request on, and its answer back."""
        if self._session is None:
            no_limit = aiohttp.ClientTimeout(total=None, sock_connect=10)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=no_limit, connector=connector, auto_decompress=False)
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP]
        try:
            body = await request.body()
            answer = await self._session.request(
                request.method, self._url + path, data=body, headers=headers, allow_redirects=False
            )
        except ClientDisconnect:
            return Response(status_code=499)
        except aiohttp.ClientError:
            return PlainTextResponse("the server is being restarted; try again", 503, {"Retry-After": "5"})
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP}
        return StreamingResponse(pieces(answer), answer.status, kept)


async def pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body as it comes. A client that hangs up ends the request to the server, too."""
    try:
        async for piece in answer.content.iter_any():
            yield piece
    except asyncio.CancelledError:
        answer.close()
        raise
    finally:
        answer.release()


def app(args: dict[str, Any]) -> Any:
    """The application, with options of `shoal serve`: `serve run shoal.cluster:app model=/models/m max_replicas=4`."""
    return ShoalServer.bind(dict(args))  # type: ignore[attr-defined]
