"""shoal serve: an OpenAI-compatible server. This process supervises the engines and the fronts, and keeps the ledger of
the keys' limits, which outlives both."""

import argparse
import importlib.util
import ipaddress
import logging
import os
import secrets
import shlex
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.cli.checks import check_early
from shoal.cli.common import new_command
from shoal.config.engine import EngineConfig, add_flags
from shoal.config.serve import ServeConfig, as_json, read_options
from shoal.core.tiers import Tiers
from shoal.errors import BadConfig, EngineError
from shoal.keys.api_key import ApiKey
from shoal.keys.file import PUBLISHED, check_tiers, hashed, joined, publish, read_key_file
from shoal.keys.limits import KeyLimits, TenantLimits

ENGINE = "shoal.processes.engine"

log = logging.getLogger(__name__)


def add_serve(commands: Any) -> None:
    parser = new_command(
        commands,
        "serve",
        "serve a model to many users over HTTP, with OpenAI's API",
        "shoal serve --port 8000 --max-num-seqs 32 --api-key alice=sk-0123456789",
        run_serve,
        log_level=False,  # one of the options below
    )
    parser.add_argument("model", nargs="?", default=None, help="folder, .gguf file or hub name (default: SmolLM2)")
    parser.add_argument("--config", metavar="FILE", help="YAML file with 'option: value' lines")
    parser.add_argument("--json", action="store_true", help="print the ready message as one JSON line")
    add_flags(parser, ServeConfig)
    add_flags(parser)


def run_serve(args: argparse.Namespace) -> int:
    engine, serve = read_options(args)
    engine.for_answers()
    check_cluster(serve)
    check_early(engine, elsewhere=serve.cluster is not None)
    from shoal.engine.spare import NoSpare, Spare
    from shoal.engine.supervise import Supervisor
    from shoal.engine.wire import GIVEN_UP
    from shoal.keys.ledger_service import LedgerService
    from shoal.obs.logs import set_up_logs

    set_up_logs(serve.log_level, serve.log_format)
    tiers = engine.read_tiers()
    keys = load_keys(serve, tiers)
    listener = listen(serve)
    folder = PrivateFolder()
    default = TenantLimits(serve.key_max_concurrent, serve.key_tokens_per_minute)
    ledger = LedgerService(folder.path, KeyLimits(lambda: folder.keys, default))
    try:
        if keys:
            folder.publish(keys)
            ledger.start()
        children = make_children(engine, serve, folder.path, listener, folder.mend, supervised=True)
        engines = len(children) - serve.api_workers
        supervisor = Supervisor(
            children[:engines],
            children[engines:],
            serve.drain_timeout,
            lambda: print_ready(engine, serve, listener, args.json),
            on_hangup=None if ends_with_its_terminal(serve) else lambda: reload_keys(serve, tiers, folder),
            on_given_up=(folder.path / GIVEN_UP).touch,
            spare=Spare(ENGINE) if serve.spare_engine and serve.cluster is None else NoSpare(),
        )
        return supervisor.run()
    finally:
        ledger.stop()
        listener.close()
        shutil.rmtree(folder.path, ignore_errors=True)


class PrivateFolder:
    """Folder that the server's processes share: the sockets of engine and ledger, the current keys. Only this user can
    enter it."""

    def __init__(self) -> None:
        check_socket_paths(tempfile.gettempdir())
        self.path = Path(tempfile.mkdtemp(prefix="shoal-"))
        self.keys: Sequence[ApiKey] = ()  # in force; replaced as a whole, since the ledger's thread reads them

    def publish(self, keys: Sequence[ApiKey]) -> None:
        publish(keys, self.path)
        self.keys = keys

    def mend(self) -> None:
        """Recreate it if it was removed, for instance by a cleaner of temporary files: the next engine's socket goes
        there, and the fronts look for it under the same name."""
        try:
            if not self.path.exists():
                log.warning(
                    "the folder %s was removed and is recreated; exclude it from cleaners of temporary files", self.path
                )
                self.path.mkdir(mode=0o700)
            found = self.path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise EngineError(
                    f"{self.path} is no longer a folder that only this user can enter; restart the server"
                )
            if self.keys and not (self.path / PUBLISHED).exists():
                publish(self.keys, self.path)
        except OSError as error:
            raise EngineError(f"the folder {self.path} cannot be recreated: {error.strerror}") from error


def check_socket_paths(folder: str) -> None:
    """Raise BadConfig if the sockets of a server would have longer paths below this folder than the system allows."""
    path = os.path.join(folder, "shoal-12345678", "e999", "engine.ipc")  # no socket's path is longer
    limit = 107 if sys.platform == "linux" else 103  # bytes of sockaddr_un.sun_path, less the NUL at its end
    if len(os.fsencode(path)) > limit:
        raise BadConfig(
            f"the folder for temporary files, {folder}, has too long a path for the server's sockets: they would have "
            f"up to {len(os.fsencode(path))} bytes, and the system allows {limit}; set TMPDIR to a shorter path, such "
            f"as /tmp"
        )


def load_keys(serve: ServeConfig, tiers: Tiers) -> list[ApiKey]:
    """All keys, from flags and from the file."""
    keys = joined(hashed(serve.keys()), read_key_file(serve.api_keys_file) if serve.api_keys_file else [])
    check_tiers(keys, tiers)
    return keys


def ends_with_its_terminal(serve: ServeConfig) -> bool:
    """A closed terminal sends SIGHUP too. Without a key file to reload, a server in a terminal ends on it."""
    return not serve.api_keys_file and sys.stdin is not None and sys.stdin.isatty()


def reload_keys(serve: ServeConfig, tiers: Tiers, folder: PrivateFolder) -> None:
    """Reload the key file; an invalid one changes nothing."""
    if not serve.api_keys_file:
        log.warning("SIGHUP ignored: there is no key file to reload; start the server with --api-keys-file")
        return
    try:
        keys = load_keys(serve, tiers)
        folder.publish(keys)
    except (BadConfig, OSError) as error:
        log.error("the API keys are unchanged: %s", error)
        return
    log.info("the key file was reloaded: %d API keys", len(keys))


def listen(serve: ServeConfig) -> socket.socket:
    """The port, bound before anything slow begins."""
    family = socket.AF_INET6 if ":" in serve.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((serve.host, serve.port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise BadConfig(
            f"cannot listen on {serve.host}:{serve.port}: {error.strerror or error}; choose another --host or --port"
        ) from error
    listener.setblocking(False)
    return listener


def check_cluster(serve: ServeConfig) -> None:
    """Raise BadConfig if the libraries of the cluster are not installed. Does not load them."""
    if serve.cluster is not None and importlib.util.find_spec(serve.cluster) is None:
        raise BadConfig(f"--cluster {serve.cluster} needs the extra: pip install 'shoal[server,cluster]'")


def make_children(
    engine: EngineConfig,
    serve: ServeConfig,
    folder: Path,
    listener: socket.socket,
    mend: Callable[[], None] = lambda: None,
    supervised: bool = False,
) -> Any:
    """The engines, then the fronts. `mend`: repairs the folder before each start of an engine. `supervised`: a
    Supervisor is their parent."""
    from shoal.engine.curve import KeyPair
    from shoal.engine.supervise import Child

    count = len(serve.roles)
    homes = [folder / f"e{number}" for number in range(count)] if count > 1 else [folder]
    client_keys = None if serve.cluster is None else KeyPair.fresh().as_json()
    shared = {
        "log_level": serve.log_level,
        "log_format": serve.log_format,
        "folder": str(folder),
        "keys": bool(serve.api_key or serve.api_keys_file),  # the keys are in the folder, hashed
    }
    salt_secret = secrets.token_hex(32)  # the same for all fronts, across their restarts

    def for_front(name: str, life: int) -> Mapping[str, Any]:
        return {
            **shared,
            "serve": as_json(replace(serve, api_key=())),
            "salt_secret": salt_secret,
            "model": engine.model,
            "seed": engine.seed,
            "uses_priority": engine.order == "priority",
            "chat_template": engine.chat_template,
            "special_tokens_in_messages": engine.special_tokens_in_messages,
            "max_queue": engine.max_queue,
            "max_wait": engine.max_wait,
            "listen_fd": listener.fileno(),
            "engines": [str(home) for home in homes],
            "client_keys": client_keys,
            "supervised": supervised,
            "name": f"{name}.{life}",
        }

    silence_s, port = serve.hang_timeout, [listener.fileno()]
    fronts = [
        Child(name, "shoal.processes.front", partial(for_front, name), port, silence_s=silence_s)
        for name in (f"front-{number}" for number in range(serve.api_workers))
    ]
    if client_keys is not None:
        return [make_fleet(engine, serve, {**shared, "client_keys": client_keys}, mend), *fronts]
    return [*make_engines(engine, serve, homes, shared, mend), *fronts]


def make_fleet(engine: EngineConfig, serve: ServeConfig, shared: Mapping[str, Any], mend: Callable[[], None]) -> Any:
    """The one child that places the engines on a cluster."""
    from shoal.engine.supervise import Child

    def config(life: int) -> Mapping[str, Any]:
        mend()
        return {**shared, "serve": as_json(replace(serve, api_key=())), "engine": as_json(engine), "epoch": life}

    return Child("the fleet", "shoal.cluster.process", config, silence_s=serve.hang_timeout, restarts_its_own=True)


def make_engines(
    engine: EngineConfig, serve: ServeConfig, homes: Sequence[Path], shared: Mapping[str, Any], mend: Callable[[], None]
) -> list[Any]:
    """One child per home, the folder of its own."""
    from shoal.engine import blackbox
    from shoal.engine.supervise import Child
    from shoal.engine.wire import GIVEN_UP

    shares = shares_of(engine, serve)
    transport = transport_of(serve, shares)

    def config(home: Path, share: Any, role: str, life: int) -> Mapping[str, Any]:
        mend()
        home.mkdir(mode=0o700, exist_ok=True)
        own = {"home": str(home), "share": share, "drain_timeout": serve.drain_timeout}
        own |= {"role": role, "kv_transport": transport}
        return {**shared, **own, "engine": as_json(engine), "epoch": life}

    made = []
    for number, (home, share, role) in enumerate(zip(homes, shares, serve.roles, strict=True)):
        name = f"engine {number}" if len(homes) > 1 else "the engine"
        own = partial(config, home, share, role)
        one = Child(name, ENGINE, own, silence_s=serve.hang_timeout)
        one.on_hang = partial(blackbox.mark_fault, home)
        one.on_given_up = (home / GIVEN_UP).touch
        made.append(one)
    return made


def shares_of(engine: EngineConfig, serve: ServeConfig) -> list[dict[str, Any] | None]:
    """What each engine gets of this machine; None: all of it."""
    from shoal.machine.shares import machine_shares, visible_gpus

    count, apart = len(serve.roles), serve.prefill_replicas is not None
    if count == 1:
        return [None]
    gpus = [] if engine.device == "cpu" else visible_gpus()
    each = engine.tensor_parallel_size
    if gpus and count * each > len(gpus) and not apart:
        many = "as many GPUs" if each == 1 else f"{each} GPUs for each of them"
        raise BadConfig(f"--replicas {count} needs {many}, and there are {len(gpus)}; lower it, or use --device cpu")
    found = machine_shares(count, gpus_each=each, share_gpus=apart)
    return [asdict(share if gpus else replace(share, gpu="", on_gpu=1)) for share in found]


def transport_of(serve: ServeConfig, shares: Sequence[Mapping[str, Any] | None]) -> str | None:
    """How KV blocks go from prefill to decode engines; None: they do not. Raises BadConfig for a way that is not there
    between some of them."""
    if serve.prefill_replicas is None:
        return None
    from shoal.disagg.handoff import PREFILL, Site, choose_transport, why_not

    sites = [Site("here", share["gpu"] if share else "") for share in shares]
    pairs = [
        (source, target)
        for source, of_source in zip(sites, serve.roles, strict=True)
        for target, of_target in zip(sites, serve.roles, strict=True)
        if of_source == PREFILL != of_target
    ]
    if serve.kv_transport is None:
        found = {choose_transport(*pair) for pair in pairs}
        return found.pop() if len(found) == 1 else "shm"
    for pair in pairs:
        reason = why_not(serve.kv_transport, *pair)
        if reason:
            raise BadConfig(f"--kv-transport {serve.kv_transport}: {reason}")
    return serve.kv_transport


def print_ready(engine: EngineConfig, serve: ServeConfig, listener: socket.socket, as_line: bool) -> None:
    """The addresses, and a command to try."""
    url = address(serve, listener)
    if as_line:
        import json

        print(json.dumps({"ready": True, "url": url}), flush=True)
        return
    key = " -H 'Authorization: Bearer YOUR-KEY'" if serve.api_key or serve.api_keys_file else ""
    insecure = " -k" if serve.ssl_certfile else ""
    body = shlex.quote('{"messages": [{"role": "user", "content": "Tell me about fish."}], "stream": true}')
    print(
        f"\nShoal is ready.\n"
        f"  API      {url}/v1\n"
        f"  chat     {url}/\n"
        f"  docs     {url}/docs\n"
        f"  metrics  {url}/metrics\n\n"
        f"  curl{insecure} {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {body}\n",
        flush=True,
    )
    sys.stdout.flush()


def address(serve: ServeConfig, listener: socket.socket) -> str:
    """A URL that works from this machine."""
    host, port = listener.getsockname()[:2]
    try:
        anywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        anywhere = False
    shown = "127.0.0.1" if anywhere else f"[{host}]" if ":" in host else host
    return f"{'https' if serve.ssl_certfile else 'http'}://{shown}:{port}"
