"""Memory: how much room a request needs before it may start.

ondemand   its known tokens; blocks for its output are taken when they are needed
"""

from typing import Protocol

from shoal.core.request import Request


class Memory(Protocol):
    """How much KV to set aside when a request starts."""

    def room(self, request: Request) -> int:
        """Positions to hold blocks for before it starts."""

    def spare(self, total_blocks: int, running: int) -> int:
        """Blocks that must stay free beyond that."""


class OnDemand:
    """Start with room for what is known, and keep a few blocks free so that those who run can grow."""

    def __init__(self, watermark: float = 0.01) -> None:
        self.watermark = watermark

    def room(self, request: Request) -> int:
        return len(request.tokens)

    def spare(self, total_blocks: int, running: int) -> int:
        return int(self.watermark * total_blocks) if running else 0


MEMORY: dict[str, type[Memory]] = {"ondemand": OnDemand}
