"""The engine's own process: `python -m shoal.processes.engine`, config in as JSON on standard input, never a pickle.

Builds the engine, opens its socket in the private folder and serves fronts until SIGTERM. Exit code 2 means that the
config cannot be served; the reason is on standard error. main() and serve() are for other engine programs, too.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.config.engine import EngineConfig
from shoal.core.ports import Executor
from shoal.engine import blackbox, wire
from shoal.engine.host import Host, Inbox, InboxClock, Suspected, open_socket
from shoal.engine.refusal import say_refused
from shoal.engine.supervise import USERS_MISTAKE, Heartbeat, die_with_parent, say_ready
from shoal.errors import EngineLost, ShoalError
from shoal.obs.logs import set_up_logs
from shoal.obs.metrics import EngineMetrics, policies_of
from shoal.processes.hooks import EXECUTOR_WRAPPER, hook
from shoal.text.grammar import Grammars, warming

log = logging.getLogger("shoal.processes.engine")


def main(run: Callable[[Mapping[str, Any]], None]) -> int:
    """Read the config, run the program, return its exit code."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGHUP):  # the supervisor handles both
        signal.signal(number, signal.SIG_IGN)
    config = json.load(sys.stdin)
    set_up_logs(config["log_level"], config["log_format"])
    try:
        run(config)
    except EngineLost as error:
        end_engine(error)
    except ShoalError as error:
        say_refused(error, Path(config["folder"]), config.get("epoch", 0))
        return USERS_MISTAKE
    return 0


def leave(code: int) -> None:
    """End this process at once: nothing is left to do, and torch's threads need not be waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_engine(error: EngineLost) -> None:
    """End this process at once, from any thread: a pass may wait forever for the rank that was lost.

    A rank that was killed from outside is as if this process was: no request is blamed for it.
    """
    log.error("the engine ends: %s", error)
    if not error.fault:
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    leave(1)


def run(config: Mapping[str, Any]) -> None:
    folder = Path(config["folder"])
    socket = open_socket(folder)
    suspects = Suspected(*blackbox.read(folder)) if config.get("after_fault") else None
    box = blackbox.BlackBox(folder)
    host = make_host(config, socket, suspects)
    host.loop.on_begin = box.note
    host.loop.executor = wrapped(host.loop.executor, os.environ)
    host.beat = Heartbeat(config["ready_fd"], host.loop.clock)
    serve(host, config)


def serve(host: Host, config: Mapping[str, Any]) -> None:
    """Answer fronts until SIGTERM comes."""
    signal.signal(signal.SIGTERM, lambda number, frame: host.stop())
    host.socket.bind(f"ipc://{Path(config['folder']) / wire.ADDRESS}")
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
        host.socket.close(linger=0)


def make_host(config: Mapping[str, Any], socket: Inbox, suspects: Suspected | None = None) -> Host:
    """The engine of this config, behind the socket."""
    from shoal.build import build  # loads torch

    engine = EngineConfig(**config["engine"]).for_answers()
    folder = Path(config["folder"])
    made: list[Grammars] = []
    built = build(
        engine,
        InboxClock(socket),
        progress=sys.stderr.isatty(),
        in_idle_moments=True,
        spare_folder=folder / "kernels",  # the next engine finds it there
        on_tokenizer=lambda files, tokenizer: made.append(warming(files, tokenizer)),  # beside loading the weights
    )
    built.ranks.on_lost = end_engine
    drafters = built.loop.scheduler.policies.drafts.drafter.names
    metrics = EngineMetrics(policies_of(built.config), drafters)
    return Host(
        built.loop,
        socket,
        built.info(config["epoch"]),
        observers=[metrics],
        answers={"metrics": metrics.render},
        make_grammar=made[0].make if made else None,
        suspects=suspects,
    )


def wrapped(executor: Executor, environ: Mapping[str, str]) -> Executor:
    """The executor inside the one that the debugging hook makes of it; itself without the hook."""
    wrap = hook(EXECUTOR_WRAPPER, environ)
    return executor if wrap is None else wrap(executor)


if __name__ == "__main__":
    leave(main(run))
