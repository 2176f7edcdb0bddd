"""The engine's own process: `python -m shoal.processes.engine`, config in as JSON on standard input, never a pickle.

Builds the engine, opens its socket (in its home, a private folder, or on TCP with CURVE) and serves fronts until
SIGTERM. SIGUSR1 has it end as soon as the fronts have moved their jobs to other engines. Exit code 2 means that the
config cannot be served; the reason is on standard error. main() and serve() are for other engine programs, too.
"""

import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.config.engine import EngineConfig
from shoal.core.ports import Executor
from shoal.disagg.links import KVLinks, links_of
from shoal.engine import blackbox
from shoal.engine.blackbox import Suspected
from shoal.engine.curve_outbox import network_links
from shoal.engine.host import Host, InboxClock
from shoal.engine.listen import Inbox, Listening, host_of, listening_of
from shoal.engine.refusal import say_refused
from shoal.engine.supervise import USERS_MISTAKE, Heartbeat, die_with_parent, name_process, say_ready
from shoal.errors import EngineLost, ShoalError
from shoal.machine.shares import VISIBLE, MachineShare
from shoal.obs.logs import set_up_logs
from shoal.obs.metrics import EngineMetrics, policies_of
from shoal.obs.recent import RecentWork
from shoal.obs.utilisation import Utilisation
from shoal.processes.hooks import EXECUTOR_WRAPPER, hook
from shoal.text.grammar import Grammars, warming

SPARE_NICENESS = 5  # of 19; with it a thread gets about a third of what a busy one without it gets

log = logging.getLogger("shoal.processes.engine")


def main(run: Callable[[Mapping[str, Any]], None], name: str = "shoal-engine") -> int:
    """Read the config, run the program, return its exit code. With the argument `spare` the config may come much later,
    and what takes long to load is loaded before it."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # the supervisor handles the first two
        signal.signal(number, signal.SIG_IGN)
    if sys.argv[1:] == ["spare"]:
        name_process("shoal-spare")
        load_behind_others()
    config = json.load(sys.stdin)
    name_process(name)
    set_up_logs(config["log_level"], config["log_format"])
    try:
        run(config)
    except EngineLost as error:
        end_engine(config, error)
    except ShoalError as error:
        say_refused(error, Path(config["folder"]), config.get("epoch", 0))
        return USERS_MISTAKE
    return 0


def load_behind_others() -> None:
    """Load torch and the rest while running engines go first. Only a thread gives way: a process that has done so does
    not get its priority back without privileges, but this one's main thread never lost its own."""

    def load() -> None:
        if sys.platform == "linux":  # elsewhere all threads of a process have one priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SPARE_NICENESS)
        load_program()

    thread = threading.Thread(target=load, name="load")
    thread.start()
    thread.join()


def load_program() -> None:
    """Load torch and the rest of the engine. None of it is ever garbage: collecting meanwhile would take a tenth of the
    time, and later collections need not go through it."""
    gc.disable()
    try:
        import shoal.build  # noqa: F401  # loads torch
    finally:
        gc.freeze()
        gc.enable()


def leave(code: int) -> None:
    """End this process at once: nothing is left to do, and torch's threads need not be waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_engine(config: Mapping[str, Any], error: EngineLost) -> None:
    """End this process at once, from any thread: a pass may wait forever for the rank that was lost.

    A rank that was killed from outside is as if this process was: no request is blamed for it.
    """
    log.error("the engine ends: %s", error)
    if not error.fault:
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    blackbox.mark_fault(home_of(config), config["epoch"])
    leave(1)


def run(config: Mapping[str, Any]) -> None:
    home = home_of(config)
    listening = listening_of(config, home)
    suspects = Suspected(*blackbox.read(home)) if config.get("after_fault") else None
    box = blackbox.BlackBox(home)
    blackbox.mark_faults(home, config["epoch"])
    host = make_host(config, listening.socket, suspects)
    host.loop.on_begin = box.note
    host.loop.executor = wrapped(host.loop.executor, os.environ)
    host.beat = Heartbeat(config["ready_fd"], host.loop.clock)
    try:
        serve(host, config, listening)
    except EngineLost:
        raise
    except Exception:
        blackbox.mark_fault(home, config["epoch"])
        raise


def home_of(config: Mapping[str, Any]) -> Path:
    """The engine's own folder: that of the server, or one in it where there are several engines."""
    return Path(config.get("home") or config["folder"])


def serve(host: Host, config: Mapping[str, Any], listening: Listening) -> None:
    """Answer fronts until SIGTERM comes."""
    signal.signal(signal.SIGTERM, lambda number, frame: host.stop())
    signal.signal(signal.SIGUSR1, lambda number, frame: host.drain(config.get("drain_timeout", 0.0)))
    listening.bind().write(home_of(config))
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
        listening.close()


def make_host(config: Mapping[str, Any], socket: Inbox, suspects: Suspected | None = None) -> Host:
    """The engine of this config, behind the socket."""
    share = MachineShare(**config["share"]) if config.get("share") else MachineShare(1)
    engine = EngineConfig(**config["engine"]).for_answers()
    if share.gpu and engine.device != "cpu":
        os.environ[VISIBLE] = share.gpu  # before torch is loaded
    log.info("starting: loading torch, then %s", engine.model or "the default model")
    load_program()
    from shoal.build import build, pick_device
    from shoal.build_rates import describe, measure_when_idle, work_of

    if share.of > 1 and pick_device(engine.device) == "cpu":
        engine = on_its_cpus(engine, share)
    elif share.on_gpu > 1:
        engine = replace(engine.divided(share.on_gpu), kv_share=(engine.kv_share or 0.9) / share.on_gpu)
    folder, links = Path(config["folder"]), kv_links(config)
    made: list[Grammars] = []
    built = build(
        engine,
        InboxClock(socket),
        progress=sys.stderr.isatty(),
        in_idle_moments=True,
        spare_folder=folder / "kernels",  # the next engine finds it there
        on_tokenizer=lambda files, tokenizer: made.append(warming(files, tokenizer)),  # beside loading the weights
        links=links,
    )
    built.ranks.on_lost = partial(end_engine, config)
    drafters = built.loop.scheduler.policies.drafts.names
    use = Utilisation(work_of(built))
    measure_when_idle(built, use.learn)
    metrics, recent = EngineMetrics(policies_of(built.config), drafters, use), RecentWork()
    host = Host(
        built.loop,
        socket,
        replace(built.info(config["epoch"]), role=links.role, outbox=links.address),
        observers=[metrics, recent],
        answers={"metrics": metrics.render},
        make_grammar=made[0].make if made else None,
        suspects=suspects,
    )
    host.feed.shares = use.of_pass
    about = describe(built)
    host.answers["state"] = lambda: json.dumps({**host.state(), "utilisation": use.state()}).encode()
    host.answers["passes"] = lambda: json.dumps({**about, **seen_by(host, use), **recent.state()}).encode()
    return host


def kv_links(config: Mapping[str, Any]) -> KVLinks:
    """To engines of the other role, on this machine or, where this engine listens on the network, on any."""
    role, transport, home = config.get("role", ""), config.get("kv_transport"), home_of(config)
    if config.get("listen") is None:
        return links_of(role, transport or "shm", home)
    return network_links(role, host_of(config["listen"]), home if transport is None else None)


def seen_by(host: Host, use: Utilisation) -> dict[str, Any]:
    """What the engine has learned besides its latest passes."""
    block_s = host.loop.scheduler.policies.copies.block_s
    rates = use.rates
    return {
        "now_s": host.loop.clock.now_s(),
        "utilisation": use.state(),
        "flop_s": rates.flop_s if rates else None,
        "bytes_s": rates.bytes_s if rates else None,
        "copy_block_s": {"out": block_s.get(True), "in": block_s.get(False)},
    }


def on_its_cpus(engine: EngineConfig, share: MachineShare) -> EngineConfig:
    """Keep this process on its share of the CPUs, and return the config with its share of the memory."""
    if share.cpus and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, share.cpus)
        except OSError as error:  # the cpuset has changed meanwhile, or a sandbox forbids it
            log.warning("this engine is not kept on CPUs %s: %s", list(share.cpus), error.strerror)
    return replace(engine.divided(share.of), threads=engine.threads or share.threads)


def wrapped(executor: Executor, environ: Mapping[str, str]) -> Executor:
    """The executor inside the one that the debugging hook makes of it; itself without the hook."""
    wrap = hook(EXECUTOR_WRAPPER, environ)
    return executor if wrap is None else wrap(executor)


if __name__ == "__main__":
    leave(main(run))
