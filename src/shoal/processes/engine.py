"""The engine's own process: `python -m shoal.processes.engine`, config in as JSON on standard input, never a pickle.

Builds the engine, opens its socket in the private folder and serves fronts until SIGTERM. Exit code 2 means that what
was asked for is impossible, and the reason is on standard error.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.bench.paced import Emissions, PacedExecutor
from shoal.config.engine import EngineConfig
from shoal.core.job import EngineInfo
from shoal.engine import blackbox, wire
from shoal.engine.engine import Engine
from shoal.engine.host import Host, Inbox, InboxClock, Suspected, open_socket
from shoal.engine.limits import KeyLimits
from shoal.engine.loop import EngineLoop
from shoal.engine.poison import poisoned
from shoal.engine.supervise import USERS_MISTAKE, Heartbeat, die_with_parent, say_ready
from shoal.errors import ShoalError
from shoal.keys.file import KeyBook
from shoal.obs.logs import set_up_logs
from shoal.obs.metrics import EngineMetrics, policies_of
from shoal.sched.admission import Limits

log = logging.getLogger("shoal.processes.engine")


def main() -> int:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGHUP):  # both are for the supervisor
        signal.signal(number, signal.SIG_IGN)
    config = json.load(sys.stdin)
    set_up_logs(config["log_level"], config["log_format"])
    try:
        run(config)
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return USERS_MISTAKE
    return 0


def run(config: Mapping[str, Any]) -> None:
    folder = Path(config["folder"])
    socket = open_socket(folder)
    suspects = Suspected(*blackbox.read(folder)) if config.get("after_fault") else None
    box = blackbox.BlackBox(folder)
    host = make_host(config, socket, suspects)
    host.loop.on_begin = box.note
    host.loop.executor = poisoned(host.loop.executor, os.environ)
    host.beat = Heartbeat(config["ready_fd"], host.loop.clock)
    signal.signal(signal.SIGTERM, lambda number, frame: host.stop())
    socket.bind(f"ipc://{folder / wire.ADDRESS}")
    info = host.info
    log.info(
        "engine ready: %s on %s, context %d, KV cache of %d tokens",
        info.dtype, info.device, info.max_model_len, info.kv_tokens,
    )  # fmt: skip
    say_ready(config["ready_fd"])
    try:
        host.run()
    finally:
        host.loop.close()
        socket.close(linger=0)
    if config.get("paced"):
        assert isinstance(host.observers[0], Emissions)
        host.observers[0].save(Path(config["paced"]["save"]))


def make_host(config: Mapping[str, Any], socket: Inbox, suspects: Suspected | None = None) -> Host:
    """The engine of this config, behind the socket."""
    from shoal.build import build, default_limits  # loads torch

    engine = EngineConfig(**config["engine"])
    if config.get("paced"):
        return paced_host(engine, config["paced"], socket)
    limits_of = None
    if config.get("keys"):
        limits_of = KeyLimits(KeyBook(Path(config["folder"])), default_limits(engine))
    built = build(
        engine,
        InboxClock(socket),
        progress=sys.stderr.isatty(),
        limits_of=limits_of,
        in_idle_moments=True,
        spare_folder=Path(config["folder"]) / "kernels",  # the next engine finds it there
    )
    info = EngineInfo(
        config["epoch"],
        built.limits.max_model_len,
        built.limits.vocab_size,
        built.kv_blocks * built.config.block_size,
        str(built.dtype).removeprefix("torch."),
        built.device,
    )
    make_grammar = None
    if built.tokenizer is not None:
        from shoal.text.grammar import Grammars

        make_grammar = Grammars(built.tokenizer, built.spec.vocab_size, sorted(built.eos)).make
    metrics = EngineMetrics(policies_of(built.config))
    return Host(built.loop, socket, info, [metrics], {"metrics": metrics.render}, make_grammar, suspects)


def paced_host(engine: EngineConfig, paced: Mapping[str, Any], socket: Inbox) -> Host:
    """An engine that computes nothing, for measuring fronts."""
    from shoal.build import make_scheduler

    limits = Limits(paced["kv_tokens"], engine.slots, engine.pass_tokens, vocab_size=1000)
    scheduler = make_scheduler(engine, limits, -(-paced["kv_tokens"] // engine.block_size) + engine.slots)
    executor = PacedExecutor(paced["tick_s"], tokens=list(range(50, 100)))
    loop = EngineLoop(Engine(scheduler), executor, InboxClock(socket), depth=1)
    info = EngineInfo(0, limits.max_model_len, limits.vocab_size, paced["kv_tokens"], "none", "paced")
    emissions = Emissions()
    return Host(loop, socket, info, [emissions], {"metrics": emissions.render})


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to do, and torch's threads need not be waited for
