"""A front's own process: `python -m shoal.processes.front`, config in as JSON on standard input.

HTTP, tokenizing and detokenizing; no torch. Accepts connections on an inherited socket, so that several fronts can
share one port. SIGTERM drains: new requests are refused, running ones may finish, then exit code 0.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shoal.config.serve import ServeConfig, serve_config_from_json
from shoal.engine.client import ZmqClient
from shoal.engine.curve import KeyPair
from shoal.engine.link import EngineAddress
from shoal.engine.members import Follower
from shoal.engine.refusal import say_refused
from shoal.engine.restart_policy import RefuseAtOnce, RestartPolicy, WaitForEngine
from shoal.engine.supervise import BEAT_S, USERS_MISTAKE, Heartbeat, die_with_parent, name_process, say_ready
from shoal.errors import ShoalError
from shoal.files.source import ModelFiles, eos_ids, find_model, sampling_defaults, served_names
from shoal.keys.api_key import no_keys
from shoal.keys.file import KeyBook
from shoal.keys.ledger_client import LedgerClient
from shoal.keys.limits import KeyLimits, TenantLimits
from shoal.machine.malloc import give_memory_back, trim
from shoal.obs.logs import set_up_logs
from shoal.obs.metrics import FrontMetrics
from shoal.obs.spans import open_spans
from shoal.processes.hooks import LOOP_FACTORY, hook
from shoal.routing.router import Router
from shoal.server.app import Front
from shoal.server.front_metrics import SocketFronts
from shoal.server.live_routes import record
from shoal.server.protocol import make_server
from shoal.server.response_store import NoStore, ResponseStore, SqliteStore
from shoal.server.settings import ServerSettings
from shoal.server.templates import TemplateWorker
from shoal.text.grammar import grammars_of
from shoal.text.template import read_template
from shoal.text.tokenizer import load_tokenizer

SWITCH_S = 0.001  # how long a busy thread may keep the event loop's from running
STORE = "responses.sqlite"
TRIM_S = 20.0  # between two times that freed memory is given back
# far apart: a full collection takes tens of milliseconds with many requests, whose objects form no circles
GC_THRESHOLDS = (20_000, 50, 100)
log = logging.getLogger("shoal.processes.front")


def main() -> int:
    die_with_parent()
    name_process("shoal-front")
    give_memory_back()
    for number in (signal.SIGINT, signal.SIGHUP):  # the supervisor handles both
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    config = json.load(sys.stdin)
    set_up_logs(config["log_level"], config["log_format"])
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run(config))
    except ShoalError as error:
        say_refused(error, Path(config["folder"]), int(config["name"].partition(".")[2]))
        return USERS_MISTAKE
    return 0


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    return hook(LOOP_FACTORY, os.environ) or uvloop.new_event_loop


async def run(config: Mapping[str, Any]) -> None:
    serve = serve_config_from_json(config["serve"])
    files = find_model(config["model"])
    in_messages = config["special_tokens_in_messages"] == "tokens"
    tokenizer = load_tokenizer(files, read_template(config["chat_template"]), in_messages)
    grammars = None
    if tokenizer is not None:
        grammars = grammars_of(files, tokenizer)
        tokenizer.warm()  # both now, while the engine starts, too: later they would stop the event loop
        grammars.warm()
    client = make_client(config, serve)
    client.start()
    settings = make_settings(config, serve, files)
    spans = open_spans(serve.otlp_endpoint, settings.version)
    default = TenantLimits(serve.key_max_concurrent, serve.key_tokens_per_minute)
    limiter = LedgerClient(Path(config["folder"]), KeyLimits(settings.keys, default))
    front = Front(
        settings,
        client,
        tokenizer,
        grammars,
        frozenset(eos_ids(files)),
        dict(sampling_defaults(files)),
        FrontMetrics(lasting_name(config)),
        spans,
        limiter,
        store := open_store(config, serve),
    )
    client.live = front.live.ring  # nothing was awaited since start(): no engine is known yet
    if config.get("supervised"):
        front.restart_engines = restart_engines
    front.other_fronts = others = SocketFronts(Path(config["folder"]), lasting_name(config), front.tell)
    gc.collect()
    gc.freeze()  # what exists now stays: going through it again and again would hold up the event loop
    gc.set_threshold(*GC_THRESHOLDS)
    async with (
        others.open(), template_worker(front), followed_members(client, config), recording(front, config, serve),
        trimming(),
    ):  # fmt: skip
        await answer(front, serve, config, client)
    await client.close()
    await limiter.close()
    await store.close()
    await asyncio.to_thread(spans.close)


@asynccontextmanager
async def template_worker(front: Front) -> AsyncIterator[None]:
    """Render chat templates in a process of their own."""
    tokenizer = front.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        yield
        return
    front.preparer.templates = worker = TemplateWorker(tokenizer.renderer, tokenizer.special)
    worker.start()
    try:
        yield
    finally:
        await worker.close()


@asynccontextmanager
async def recording(front: Front, config: Mapping[str, Any], serve: ServeConfig) -> AsyncIterator[None]:
    """Write the passes to a file, if one is named; the first front does."""
    name, _, life = str(config["name"]).partition(".")
    if serve.record is None or name != "front-0":
        yield
        return
    task = asyncio.create_task(record(front.live, Path(serve.record), life != "0"), name="recording")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@asynccontextmanager
async def trimming() -> AsyncIterator[None]:
    """Give freed memory back from time to time, in a thread: requests leave holes between things that last."""

    async def work() -> None:
        while True:
            await asyncio.sleep(TRIM_S)
            await asyncio.to_thread(trim)

    task = asyncio.create_task(work(), name="trim memory")
    try:
        yield
    finally:
        task.cancel()


@asynccontextmanager
async def followed_members(client: ZmqClient, config: Mapping[str, Any]) -> AsyncIterator[None]:
    """Have the client's engines be those of the members file, if there is a cluster that writes one."""
    if not config.get("client_keys"):
        yield
        return
    follower = Follower(client, Path(config["folder"]), KeyPair.from_json(config["client_keys"]))
    following = asyncio.create_task(follower.run(), name="members file")
    try:
        yield
    finally:
        following.cancel()


async def answer(front: Front, serve: ServeConfig, config: Mapping[str, Any], client: ZmqClient) -> None:
    """Serve until SIGTERM comes, then drain."""
    server = make_server(front, front.settings, ssl_certfile=serve.ssl_certfile, ssl_keyfile=serve.ssl_keyfile)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    serving = asyncio.create_task(server.serve([socket.socket(fileno=config["listen_fd"])]))
    say_ready(config["ready_fd"], up=False)
    watching = asyncio.create_task(say_up(client, config["ready_fd"]))
    beating = asyncio.create_task(beat(Heartbeat(config["ready_fd"], client.clock)))
    await wait_for_first(stopping, serving)
    watching.cancel()
    await drain(front, serve.drain_timeout)
    server.should_exit = True
    await asyncio.wait({serving}, timeout=2.0)  # requests other than generations are short
    server.force_exit = True
    await serving
    beating.cancel()


async def say_up(client: ZmqClient, ready_fd: int) -> None:
    """Report to the supervisor when requests can be served."""
    while client.info is None:
        await asyncio.sleep(0.02)
    say_ready(ready_fd)


async def beat(heartbeat: Heartbeat) -> None:
    """Show the supervisor that the event loop runs."""
    while True:
        heartbeat()
        await asyncio.sleep(BEAT_S / 2)


async def wait_for_first(stopping: asyncio.Event, serving: "asyncio.Task[None]") -> None:
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


async def drain(front: Front, timeout_s: float) -> None:
    """Let running requests finish until the timeout; the rest end with an error."""
    front.draining = True
    log.info("draining: %d running requests have %g s to finish", front.active, timeout_s)
    until_s = asyncio.get_running_loop().time() + timeout_s
    while front.active and asyncio.get_running_loop().time() < until_s:
        await asyncio.sleep(0.05)
    if front.active:
        log.warning("%d requests did not finish in time and are ended", front.active)
        front.end_all()
        await asyncio.sleep(0.2)  # time to send the error


def restart_engines() -> None:
    """Ask the supervisor, whose child this process is, to restart the engines one by one."""
    os.kill(os.getppid(), signal.SIGUSR1)


def make_client(config: Mapping[str, Any], serve: ServeConfig) -> ZmqClient:
    """Of the one engine, of all engines of config["engines"], or of those of the members file."""
    folder, policy = Path(config["folder"]), restart_policy(config, serve)
    if config.get("client_keys"):  # engines on other machines come and go
        return ZmqClient(folder, config["name"], policy, engines=(), router=Router(serve.routing))
    homes = [Path(home) for home in config.get("engines", ())]
    if len(homes) < 2:
        return ZmqClient(folder, config["name"], policy)
    engines = [EngineAddress.in_folder(home, number) for number, home in enumerate(homes)]
    return ZmqClient(folder, config["name"], policy, engines=engines, router=Router(serve.routing))


def restart_policy(config: Mapping[str, Any], serve: ServeConfig) -> RestartPolicy:
    if serve.restart_policy == "refuse":
        return RefuseAtOnce()
    return WaitForEngine(config["max_queue"], config["max_wait"])


def make_settings(config: Mapping[str, Any], serve: ServeConfig, files: ModelFiles) -> ServerSettings:
    return ServerSettings(
        models=serve.served_model_name or served_names(files),
        keys=KeyBook(Path(config["folder"])) if config["keys"] else no_keys,
        salt_secret=bytes.fromhex(config["salt_secret"]),
        max_body_bytes=serve.max_body,
        max_body_memory_bytes=serve.body_memory,
        slow_client_timeout_s=serve.slow_client_timeout,
        drain_timeout_s=serve.drain_timeout,
        host=serve.host,
        allowed_hosts=serve.allowed_hosts,
        allowed_origins=serve.allowed_origins,
        log_prompts=serve.log_prompts,
        tool_format=serve.tool_format,
        reasoning_format=serve.reasoning_format,
        seed=config["seed"],
        uses_priority=config.get("uses_priority", True),
    )


def open_store(config: Mapping[str, Any], serve: ServeConfig) -> ResponseStore:
    """The store of responses: the operator's file, or one in the folder that all processes of the server share."""
    if not serve.response_store_size:
        return NoStore()
    path = Path(serve.response_store or Path(config["folder"]) / STORE)
    return SqliteStore(path, serve.response_store_size, serve.response_store_age)


def lasting_name(config: Mapping[str, Any]) -> str:
    """A front's name without the number of its start."""
    return str(config["name"]).partition(".")[0]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
