"""A front as its info and debug routes see it.

Owns the interface, so that these routes do not import the application that lists them.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from shoal.core.ports import EngineClient
from shoal.server.dialects.base import Dialect
from shoal.server.front_metrics import FrontCounters, OtherFronts
from shoal.server.limits import KeyGate
from shoal.server.live import LiveHub
from shoal.server.prepare import Preparer
from shoal.server.settings import ServerSettings


class FrontView(Protocol):
    """The parts of app.Front that are read."""

    settings: ServerSettings
    client: EngineClient
    preparer: Preparer
    gate: KeyGate
    metrics: FrontCounters
    other_fronts: OtherFronts
    draining: bool
    active: int
    live: LiveHub
    restart_engines: Callable[[], None] | None

    @property
    def dialects(self) -> Sequence[Dialect]: ...

    @property
    def streams(self) -> Collection[Any]: ...
