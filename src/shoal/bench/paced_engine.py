"""The paced engine's program: `python -m shoal.bench.paced_engine`, in the place of the engine's own process.

Real scheduler, host and wire over a device that computes nothing (paced.py), for measuring fronts. Writes down when
each token left, when it ends. Knows no model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.bench.paced import Emissions, PacedExecutor
from shoal.config.engine import EngineConfig
from shoal.core.job import EngineInfo
from shoal.engine.host import Host, InboxClock
from shoal.engine.listen import Inbox, PrivateListening
from shoal.engine.loop import EngineLoop
from shoal.processes.engine import leave, main, serve
from shoal.sched.admission import Limits
from shoal.sched.make import make_scheduler


def run(config: Mapping[str, Any]) -> None:
    emissions = Emissions()
    listening = PrivateListening(Path(config["folder"]))
    host = make_host(EngineConfig(**config["engine"]), config["paced"], listening.socket, emissions)
    serve(host, config, listening)
    emissions.save(Path(config["paced"]["save"]))


def make_host(engine: EngineConfig, paced: Mapping[str, Any], socket: Inbox, emissions: Emissions) -> Host:
    limits = Limits(paced["kv_tokens"], engine.slots, engine.pass_tokens, vocab_size=1000)
    scheduler = make_scheduler(engine, limits, -(-paced["kv_tokens"] // engine.block_size) + engine.slots)
    executor = PacedExecutor(paced["tick_s"], tokens=list(range(50, 100)))
    loop = EngineLoop(scheduler, executor, InboxClock(socket), depth=1)
    info = EngineInfo(0, limits.max_model_len, limits.vocab_size, paced["kv_tokens"], "none", "paced")
    return Host(loop, socket, info, observers=[emissions], answers={"metrics": lambda: b""})


if __name__ == "__main__":
    leave(main(run))
