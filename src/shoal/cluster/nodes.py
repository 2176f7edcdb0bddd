"""The cluster as Ray gives it: a placement group and an actor for each engine.

An actor holds one engine's process (holder.py). Ray restarts an actor that died, on another node if its own is gone, as
often as it takes; the fleet then starts an engine in it. The actors belong to the process that placed them, so none
outlives the server. Only public keys pass through Ray. Owns everything that is Ray's.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shoal.cluster.holder import EngineHolder, HolderStatus
from shoal.cluster.needs import Needs
from shoal.errors import BadConfig

log = logging.getLogger(__name__)

ANSWER_S = 0.3  # longest wait for an actor's answer in one tick; it is asked again in the next
CLOSE_S = 2.0  # for an actor to remove its files


class EngineActor(EngineHolder):
    """A holder in a process of Ray's, on the node where Ray placed it."""

    def __init__(self, hang_timeout_s: float) -> None:
        super().__init__(ray.util.get_node_ip_address(), hang_timeout_s)


class RayHolder:
    """One engine's place: its actor and placement group."""

    def __init__(self, needs: Needs, hang_timeout_s: float) -> None:
        self._group = placement_group([needs.bundle], strategy="STRICT_PACK")
        options = {
            "num_cpus": needs.cpus,
            "num_gpus": needs.gpus,
            "max_restarts": -1,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0),
        }
        self._actor: Any = ray.remote(EngineActor).options(**options).remote(hang_timeout_s)
        self._asked: asyncio.Future[HolderStatus] | None = None  # a question that is not answered yet
        self._answered = False

    async def status(self) -> HolderStatus | None:
        if self._asked is None:
            self._asked = asyncio.wrap_future(self._actor.status.remote().future())
        done, _ = await asyncio.wait({self._asked}, timeout=ANSWER_S)
        if not done:
            return None
        asked, self._asked = self._asked, None
        try:
            found = asked.result()
        except RayActorError as error:
            raise ConnectionError(str(error).partition("\n")[0]) from error
        self._answered = True
        return found

    async def start(self, config: Mapping[str, Any]) -> None:
        await self._call(self._actor.start.remote(dict(config)))

    async def drain(self) -> None:
        await self._call(self._actor.drain.remote())

    async def _call(self, reference: Any) -> None:
        try:
            await asyncio.wrap_future(reference.future())
        except RayActorError as error:
            raise ConnectionError(str(error).partition("\n")[0]) from error

    def release(self) -> None:
        if self._asked is not None:
            self._asked.cancel()  # its answer, or error, is not needed any more
        with contextlib.suppress(RayError, ValueError):
            if self._answered:
                ray.wait([self._actor.close.remote()], timeout=CLOSE_S)
            ray.kill(self._actor, no_restart=True)
        with contextlib.suppress(RayError, ValueError):
            remove_placement_group(self._group)


class RayCluster:
    """A connection to a Ray cluster."""

    def __init__(self, address: str | None, device: str, needs: Needs, hang_timeout_s: float) -> None:
        """`address`: HOST:PORT of its head; None: $RAY_ADDRESS, or the cluster that runs on this machine."""
        try:
            ray.init(address=address or "auto", logging_level=logging.WARNING, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"at {address}" if address else "on this machine"
            raise BadConfig(
                f"no Ray cluster can be reached {where} ({str(error).partition(chr(10))[0]}); start one with "
                f"`ray start --head`, or name another one with --cluster-address HOST:PORT"
            ) from error
        self.needs = needs.resolved(device, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        self._hang_timeout_s = hang_timeout_s

    def place(self, number: int) -> RayHolder:
        return RayHolder(self.needs, self._hang_timeout_s)

    def close(self) -> None:
        ray.shutdown()
