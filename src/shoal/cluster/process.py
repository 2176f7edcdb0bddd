"""The fleet's own process: `python -m shoal.cluster.process`, config in as JSON on standard input.

It takes the place of the engine's process under `shoal serve --cluster ray`: it places engines on the cluster, keeps
the members file for the fronts, asks the engines for their load and decides how many there are. Exit code 2 means that
the config cannot be served. If it dies, Ray ends its engines, and the next fleet starts others; the fronts keep
their requests meanwhile.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.cluster.autoscale import Autoscaler, EngineLoad, ScaleRules
from shoal.cluster.fleet import Fleet
from shoal.cluster.needs import Needs
from shoal.cluster.nodes import RayCluster
from shoal.config.serve import ServeConfig, serve_config_from_json
from shoal.engine.client import ZmqClient
from shoal.engine.curve import KeyPair
from shoal.engine.members import Follower
from shoal.engine.supervise import Heartbeat, say_ready
from shoal.errors import EngineDown
from shoal.processes.engine import leave, main

log = logging.getLogger("shoal.cluster.process")

TICK_S = 0.2  # between two looks at all engines
SCALE_S = 0.5  # between two decisions
LOAD_S = 2.0  # longest wait for an engine's load; a pass may take longer, and then the last one counts
DRAIN_S = 30.0  # for the fronts to move the jobs of an engine that is removed; they do at once


def run(config: Mapping[str, Any]) -> None:
    asyncio.run(serve(config))


async def serve(config: Mapping[str, Any]) -> None:
    """Until SIGTERM comes."""
    options = serve_config_from_json(config["serve"])
    stopping = asyncio.Event()
    needs = Needs(options.engine_cpus, options.engine_gpus)
    cluster = RayCluster(options.cluster_address, config["engine"]["device"], needs, options.hang_timeout)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)  # after Ray has set its own
    fleet = make_fleet(config, options, cluster)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, fleet.restart_all)
    watch = LoadWatch(fleet, config)
    log.info("engines need %s of a node; between %d and %d of them", cluster.needs, *bounds(options))
    try:
        watch.start()
        await keep(fleet, stopping, config["ready_fd"])
    finally:
        await watch.close()
        fleet.stop()
        cluster.close()


async def keep(fleet: Fleet, stopping: asyncio.Event, ready_fd: int) -> None:
    beat = Heartbeat(ready_fd, fleet.clock)
    told = False
    while not stopping.is_set():
        await fleet.tick()
        if fleet.was_up and not told:
            told = True
            say_ready(ready_fd)
        if told:
            beat()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), TICK_S)


def make_fleet(config: Mapping[str, Any], options: ServeConfig, cluster: RayCluster) -> Fleet:
    least, most = bounds(options)
    after_s = options.scale_in_after
    rules = ScaleRules(least, most, wait_s=options.scale_wait, down_after_s=after_s, down_pause_s=after_s / 2)
    keys = KeyPair.from_json(config["client_keys"])
    engine = engine_on_a_node(config["engine"], cluster.needs)

    def for_engine(number: int, epoch: int, after_fault: bool) -> Mapping[str, Any]:
        return {
            "engine": engine,
            "epoch": epoch,
            "after_fault": after_fault,
            "client_key": keys.public,
            "role": options.roles[number] if number < len(options.roles) else "",
            "kv_transport": options.kv_transport,
            "drain_timeout": DRAIN_S,
            "log_level": config["log_level"],
            "log_format": config["log_format"],
        }

    return Fleet(cluster.place, for_engine, Path(config["folder"]), Autoscaler(rules), str(cluster.needs))


def bounds(options: ServeConfig) -> tuple[int, int]:
    return options.least_replicas, options.most_replicas


def engine_on_a_node(engine: Mapping[str, Any], needs: Needs) -> dict[str, Any]:
    """The engine's config with its share of a node: as many threads as it has cores there."""
    if needs.gpus:
        return dict(engine)
    return {**engine, "threads": engine["threads"] or needs.cpus}


@dataclass
class LoadWatch:
    """Asks the engines for their load, as a front without jobs, and lets the fleet decide."""

    fleet: Fleet
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        folder = Path(self.config["folder"])
        self._client = ZmqClient(folder, f"fleet.{self.config['epoch']}", engines=())
        self._follower = Follower(self._client, folder, KeyPair.from_json(self.config["client_keys"]))
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._client.start()
        self._tasks = [asyncio.create_task(self._follower.run()), asyncio.create_task(self._run())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    async def _run(self) -> None:
        while True:
            try:
                up = [one.number for one in self._client.engines if one.up]
                loads = await asyncio.gather(*(self._ask(number) for number in up))
                known = {number: load for number, load in zip(up, loads, strict=True) if load is not None}
                self.fleet.scale(known)
            except Exception:  # engines are kept, whatever their number
                log.exception("no decision about the number of engines")
            await asyncio.sleep(SCALE_S)

    async def _ask(self, number: int) -> EngineLoad | None:
        try:
            found = await asyncio.wait_for(self._client.ask("load", number), LOAD_S)
        except (EngineDown, TimeoutError):
            return None
        return EngineLoad(found["waiting_tokens"], found["tokens_per_s"], found["fill"])


if __name__ == "__main__":
    leave(main(run, "shoal-fleet"))
