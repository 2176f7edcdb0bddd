"""Server configuration, and the sources of all options: flags, SHOAL_* variables and a YAML file.

Owns the name, default and limits of every server option that is not an engine option. A flag overrides a variable, a
variable overrides the file, the file overrides the default; an unknown key is an error in any of them.
"""

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from shoal.config.engine import SERVED_QUEUE, EngineConfig
from shoal.config.options import Options, option, parse_bytes
from shoal.core.names import pick
from shoal.errors import BadConfig

PREFIX = "SHOAL_"
TOOL_FORMATS = (
    *("auto", "hermes", "qwen3-coder", "llama3", "pythonic", "mistral", "mistral-args", "harmony", "generic"),
)  # text/tools/formats.py
REASONING_FORMATS = ("auto", "none", "think", "mistral", "harmony")  # text/reasoning.py
LEVELS = ("debug", "info", "warning", "error")
MOST_REPLICAS = 64  # engines on one machine
LEAST_STORE = 2**20  # bytes
BODIES = 8  # of the largest size, that a front reads at the same time by default
# A healthy idle process writes a heartbeat at least every 2 s (engine/supervise.py); the rest is for busy machines.
SHORTEST_HANG_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Options):
    """All options of a server that are not options of its engine."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all", group="server")
    port: int = option(8000, "port to listen on; 0: any free one", parse=int, group="server")
    served_model_name: tuple[str, ...] = option((), "model name in the API", group="server")
    api_key: tuple[str, ...] = option((), "key that clients must send, as NAME=KEY or KEY", group="server")
    api_keys_file: str | None = option(
        None, "YAML file with hashed API keys, their tiers and limits; reloaded on SIGHUP", group="server"
    )
    key_max_concurrent: int | None = option(
        None, "most requests of one API key at once; each sample of each prompt counts", parse=int, group="server"
    )
    key_tokens_per_minute: int | None = option(
        None, "most tokens of one API key per minute, prompt and output", parse=int, group="server"
    )
    replicas: int = option(
        1,
        "engine processes, each with its own KV cache: one per GPU, or per group of CPU cores, which divide the memory",
        parse=int,
        group="server",
    )
    routing: str = option(
        "prefix",
        "which of several engines gets a request: the one that holds its prefix, weighed against load; the one with "
        "the least work queued, in tokens; or each in turn",
        choices=("prefix", "least-load", "round-robin"),
        group="server",
    )
    prefill_replicas: int | None = option(
        None, "engines that compute prompts, with --prefill disaggregated; default: 1", parse=int, group="server"
    )
    decode_replicas: int | None = option(
        None, "engines that continue the answers, with --prefill disaggregated; default: 1", parse=int, group="server"
    )
    kv_transport: str | None = option(
        None,
        "how KV blocks go from prefill to decode engines; default: cuda-ipc between engines on one GPU, shm on one "
        "machine, else tcp",
        choices=("shm", "tcp", "cuda-ipc"),
        group="server",
    )
    cluster: str | None = option(
        None,
        "place the engines on the machines of a cluster, and restart them there (needs the extra [cluster])",
        choices=("ray",),
        group="cluster",
    )
    cluster_address: str | None = option(
        None,
        "HOST:PORT of the cluster's head; default: $RAY_ADDRESS, or the cluster that runs on this machine",
        group="cluster",
    )
    min_replicas: int | None = option(
        None, "fewest engines on the cluster; default: --replicas", parse=int, group="cluster"
    )
    max_replicas: int | None = option(
        None, "most engines on the cluster; default: as many as the fewest", parse=int, group="cluster"
    )
    engine_cpus: int | None = option(
        None,
        "cores that each engine gets on its node; default: 1 beside a GPU, else all cores of the smallest node",
        parse=int,
        group="cluster",
    )
    engine_gpus: int | None = option(
        None, "GPUs that each engine gets; default: 1 if the cluster has any", parse=int, group="cluster"
    )
    scale_wait: float = option(
        1.0,
        "seconds that a new request would wait, as predicted, from which on engines are added",
        parse=float,
        group="cluster",
    )
    scale_in_after: float = option(
        60.0,
        "seconds for which one engine fewer must have been enough before one is removed",
        parse=float,
        group="cluster",
    )
    api_workers: int = option(1, "front processes: HTTP, tokenizing, detokenizing", parse=int, group="server")
    allowed_hosts: tuple[str, ...] = option(
        (), "host name that a server without keys answers to, beside its own; * for all", group="server"
    )
    allowed_origins: tuple[str, ...] = option((), "web origin that may call from a browser; * for all", group="server")
    ssl_certfile: str | None = option(None, "certificate, for https", group="server")
    ssl_keyfile: str | None = option(None, "its private key", group="server")
    max_body: int = option(4 * 2**20, "most bytes of one request's body", parse=parse_bytes, group="server")
    max_body_memory: int | None = option(
        None,
        f"most bytes of all bodies that one front is reading; default: {BODIES} bodies of --max-body",
        parse=parse_bytes,
        group="server",
    )
    slow_client_timeout: float = option(
        30.0,
        "seconds after which a client that does not read, or does not finish sending, is disconnected",
        parse=float,
        group="server",
    )
    drain_timeout: float = option(
        30.0, "seconds for running requests to finish when the server stops", parse=float, group="server"
    )
    hang_timeout: float = option(
        120.0,
        "seconds without a heartbeat after which the engine or a front is killed and restarted; 0: never",
        parse=float,
        group="server",
    )
    spare_engine: bool = option(
        True,
        "keep a process that has the program loaded, so that an engine restarts sooner; about 200 MB",
        group="server",
    )
    restart_policy: str = option(
        "wait",
        "while the engine is restarted, new requests wait for it or are refused with 503",
        choices=("wait", "refuse"),
        group="server",
    )
    tool_format: str = option(
        "auto",
        "how the model writes tool calls; auto: as its chat template has it",
        choices=TOOL_FORMATS,
        group="server",
    )
    reasoning_format: str = option(
        "auto",
        "how the model marks its reasoning; auto: as its chat template has it; none: it is part of the answer",
        choices=REASONING_FORMATS,
        group="server",
    )
    response_store: str | None = option(
        None,
        "file (SQLite) that keeps the responses of /v1/responses; default: one that is removed when the server stops",
        group="server",
    )
    response_store_size: int = option(
        256 * 2**20, "most bytes of stored responses; 0: none are stored", parse=parse_bytes, group="server"
    )
    response_store_age: float = option(
        30 * 86400.0, "seconds after which a stored response is removed", parse=float, group="server"
    )
    record: str | None = option(
        None,
        "file for a recording of all passes, without text, for shoal live; grows by some MB a minute",
        group="server",
    )
    otlp_endpoint: str | None = option(
        None,
        "URL of an OpenTelemetry collector; sends a span per request (needs the extra [otel])",
        group="server",
    )
    log_level: str = option("info", "lowest level of messages to log", choices=LEVELS, group="server")
    log_format: str = option("text", "log format: text, or JSON lines", choices=("text", "json"), group="server")
    log_prompts: bool = option(False, "write prompts into the log", group="server")

    def __post_init__(self) -> None:
        self._check_types()
        if not 0 <= self.port <= 65535:
            raise BadConfig(f"port must be between 0 and 65535, not {self.port}")
        self._at_least("api_workers", 1)
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise BadConfig(f"replicas must be between 1 and {MOST_REPLICAS}, not {self.replicas}")
        self._check_cluster()
        for name in ("key_max_concurrent", "key_tokens_per_minute"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        self._at_least("max_body", 1024)
        if self.body_memory < 2 * self.max_body:
            raise BadConfig(
                f"max_body_memory is {self.body_memory} bytes, less than two bodies of max_body "
                f"({self.max_body}); raise --max-body-memory or lower --max-body"
            )
        for name in ("slow_client_timeout", "drain_timeout", "hang_timeout"):
            if not 0 <= getattr(self, name) < 1e6:
                raise BadConfig(f"{name} must be a number of seconds, not {getattr(self, name)}")
        if 0 < self.hang_timeout < SHORTEST_HANG_S:
            raise BadConfig(
                f"hang_timeout must be 0 (never) or at least {SHORTEST_HANG_S:g} seconds, not {self.hang_timeout:g}: "
                f"a healthy process may be silent for that long"
            )
        self._check_response_store()
        if self.record is not None:
            self._check_folder("record", self.record)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise BadConfig("https needs both --ssl-certfile and --ssl-keyfile")
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not os.access(path, os.R_OK):
                raise BadConfig(f"cannot read {name} {path}; give the path of a PEM file")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise BadConfig(f"otlp_endpoint must be a URL such as http://127.0.0.1:4318, not {self.otlp_endpoint!r}")
        keys = [key for _, key in self.keys()]
        if any(len(key) < 8 for key in keys):
            raise BadConfig("an API key must have at least 8 characters")
        if len(set(keys)) < len(keys) or len({name for name, _ in self.keys()}) < len(keys):
            raise BadConfig("two API keys, or two of their names, are equal; each must be unique")

    def _check_cluster(self) -> None:
        for name, least in (("min_replicas", 1), ("max_replicas", 1), ("engine_cpus", 1), ("engine_gpus", 0)):
            if getattr(self, name) is not None:
                self._at_least(name, least)
                self._only_with_a_cluster(name)
        if self.cluster_address is not None:
            self._only_with_a_cluster("cluster_address")
            if "://" in self.cluster_address:
                raise BadConfig(
                    f"cluster_address is HOST:PORT of the cluster's head, such as 10.0.0.1:6379, not "
                    f"{self.cluster_address!r}"
                )
        if self.most_replicas < self.least_replicas:
            raise BadConfig(
                f"max_replicas is {self.most_replicas}, less than the fewest engines, {self.least_replicas}; raise "
                f"--max-replicas or lower --min-replicas"
            )
        if not 0 < self.scale_wait < 1e6 or not 0 <= self.scale_in_after < 1e6:
            raise BadConfig("scale_wait must be a number of seconds above 0, and scale_in_after 0 or more")

    def _check_response_store(self) -> None:
        if self.response_store_size and self.response_store_size < LEAST_STORE:
            raise BadConfig(
                f"response_store_size must be 0 (none are stored) or at least {LEAST_STORE} bytes, not "
                f"{self.response_store_size}"
            )
        if not 0 < self.response_store_age < 1e10:
            raise BadConfig(f"response_store_age must be a number of seconds above 0, not {self.response_store_age}")
        if self.response_store is not None:
            if not self.response_store_size:
                raise BadConfig("response_store names a file, but response_store_size is 0; leave one of them out")
            self._check_folder("response_store", self.response_store)

    @staticmethod
    def _check_folder(name: str, path: str) -> None:
        folder = Path(path).absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
            raise BadConfig(f"{name} cannot be created in {folder}; name a file in a folder to write to")

    def _only_with_a_cluster(self, name: str) -> None:
        if self.cluster is None:
            raise BadConfig(f"{name} is for engines on a cluster; add --cluster ray, or leave it out")

    @property
    def roles(self) -> tuple[str, ...]:
        """Of each engine; "": both. On a cluster engines without a role may come and go beyond these."""
        if self.prefill_replicas is None:
            return ("",) * self.replicas
        return ("prefill",) * self.prefill_replicas + ("decode",) * (self.decode_replicas or 0)

    def with_roles(self, disaggregated: bool) -> "ServeConfig":
        """A copy with the numbers of engines of each role filled in; raises BadConfig if they cannot work."""
        own = ("prefill_replicas", "decode_replicas", "kv_transport")
        if not disaggregated:
            for name in own:
                if getattr(self, name) is not None:
                    flag = name.replace("_", "-")
                    raise BadConfig(
                        f"--{flag} is for engines of two roles; add --prefill disaggregated, or leave it out"
                    )
            return self
        prefill, decode = (1 if count is None else count for count in (self.prefill_replicas, self.decode_replicas))
        if prefill < 1:
            raise BadConfig(
                "prefill_replicas must be at least 1: decode engines get the KV of prompts from them; for engines that "
                "do both use --replicas"
            )
        if decode < 1:
            raise BadConfig(
                "decode_replicas must be at least 1: prefill engines hand requests over to them; for engines that do "
                "both use --replicas"
            )
        if self.cluster is None and prefill + decode > MOST_REPLICAS:
            raise BadConfig(f"{prefill + decode} engines are too many for one machine; use at most {MOST_REPLICAS}")
        if self.replicas != 1:
            raise BadConfig(
                "--replicas is for engines that do everything; with --prefill disaggregated use --prefill-replicas and "
                "--decode-replicas"
            )
        if self.cluster is not None:
            self._check_roles_on_a_cluster()
        return replace(self, prefill_replicas=prefill, decode_replicas=decode)

    def _check_roles_on_a_cluster(self) -> None:
        if self.min_replicas is not None or self.max_replicas is not None:
            raise BadConfig(
                "--min-replicas and --max-replicas are for engines that do everything; with --prefill disaggregated "
                "the number of engines of each role is fixed: use --prefill-replicas and --decode-replicas"
            )
        if self.kv_transport not in (None, "tcp"):
            raise BadConfig(
                f"--kv-transport {self.kv_transport} does not reach another machine, and a cluster may place engines "
                f"on several; use tcp, or leave it out: then engines on one node share memory, and others use tcp"
            )

    @property
    def least_replicas(self) -> int:
        """Fewest engines on a cluster."""
        if self.prefill_replicas is not None:
            return len(self.roles)
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most_replicas(self) -> int:
        return self.least_replicas if self.max_replicas is None else self.max_replicas

    @property
    def body_memory(self) -> int:
        """Most bytes of all bodies that one front is reading."""
        return BODIES * self.max_body if self.max_body_memory is None else self.max_body_memory

    def keys(self) -> list[tuple[str, str]]:
        """(name, key) of every API key; a key without a name gets its number as one.

        >>> ServeConfig(api_key=("alice=sk-12345678", "sk-abcdefgh")).keys()
        [('alice', 'sk-12345678'), ('key-2', 'sk-abcdefgh')]
        """
        found = []
        for number, text in enumerate(self.api_key, 1):
            named = re.fullmatch(r"([A-Za-z0-9_.-]{1,64})=(.{8,})", text)
            found.append((named[1], named[2]) if named else (f"key-{number}", text))
        return found


TABLE: dict[str, tuple[type[Any], "Field[Any]"]] = {
    item.name: (config, item) for config in (EngineConfig, ServeConfig) for item in fields(config)
}


def read_options(
    args: argparse.Namespace, environ: Mapping[str, str] | None = None
) -> tuple[EngineConfig, ServeConfig]:
    """Both configs, from the flags in `args`, the environment and the file of --config."""
    values: dict[str, Any] = {"max_queue": SERVED_QUEUE}
    values |= _from_file(getattr(args, "config", None))
    values |= _from_environment(os.environ if environ is None else environ)
    values |= {name: value for name, value in vars(args).items() if name in TABLE and value is not None}
    found = {}
    for config in (EngineConfig, ServeConfig):
        own = {name: _as_tuple(value, TABLE[name][1]) for name, value in values.items() if TABLE[name][0] is config}
        found[config] = own
    engine, serve = EngineConfig.from_mapping(found[EngineConfig]), _server(found[ServeConfig])
    return engine, serve.with_roles(engine.prefill == "disaggregated")


def _server(values: dict[str, Any]) -> ServeConfig:
    for name in ("max_body", "max_body_memory", "response_store_size"):
        if name in values:
            values[name] = parse_bytes(values[name])
    return ServeConfig(**values)


def _as_tuple(value: Any, item: "Field[Any]") -> Any:
    if not isinstance(item.default, tuple):
        return value
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else value


def _from_file(path: str | None) -> dict[str, Any]:
    """The keys of a YAML file; - and _ are equivalent in them."""
    if path is None:
        return {}
    import yaml  # imported lazily: only needed for a file

    try:
        read = yaml.safe_load(Path(path).read_text())
    except IsADirectoryError as error:
        raise BadConfig(
            f"--config: {path} is a folder, not a YAML file; for a model's folder: shoal serve {path}"
        ) from error
    except OSError as error:
        raise BadConfig(f"cannot read the config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise BadConfig(f"{path} must hold 'option: value' lines, not a {type(read).__name__}")
    found = {}
    for key, value in read.items():
        name = str(key).replace("-", "_")
        pick(TABLE, name, f"option in {path}")
        found[name] = value
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Variables such as SHOAL_MAX_NUM_SEQS=8; list items are separated by commas."""
    found = {}
    for key, text in environ.items():
        if not key.startswith(PREFIX):
            continue
        name = key.removeprefix(PREFIX).lower()
        _, item = pick(TABLE, name, f"option in the environment ({key})")
        found[name] = _parse(text, item, key)
    return found


def _parse(text: str, item: "Field[Any]", key: str) -> Any:
    if isinstance(item.default, bool):
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in known:
            raise BadConfig(f"{key} must be true or false, not {text!r}")
        return known[text.lower()]
    if isinstance(item.default, tuple):
        return tuple(part for part in text.split(",") if part)
    try:
        return item.metadata["parse"](text)
    except ValueError as error:
        raise BadConfig(f"{key} cannot be {text!r}: {error}") from error


def as_json(config: Options) -> dict[str, Any]:
    """For another process; serve_config_from_json() is the inverse."""
    return asdict(config)  # type: ignore[call-overload, no-any-return]


def serve_config_from_json(values: Mapping[str, Any]) -> ServeConfig:
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return ServeConfig(**given)
