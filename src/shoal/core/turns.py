"""Taking turns on an event loop.

Owns how long one piece of work may have the loop before others get a turn. Knows nothing of the work.
"""

import asyncio

from shoal.core.clock import WallClock

TURN_S = 0.004  # several pieces of work may each have a turn before a short request has its own
_now_s = WallClock().now_s


class TurnTaker:
    """Of one piece of work, which calls if_long() between its steps; where every step counts, is_long() first."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Others have had the loop, since this work waited for something."""
        self._until_s = _now_s() + TURN_S

    def is_long(self) -> bool:
        return _now_s() > self._until_s

    async def turn(self) -> None:
        """Let others have the loop."""
        await asyncio.sleep(0)
        self.restart()

    async def if_long(self) -> None:
        if self.is_long():
            await self.turn()
