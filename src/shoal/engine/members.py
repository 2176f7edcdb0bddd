"""The members file: which engines a deployment has now, for fronts that follow engines as they come and go.

It lies in the private folder, is written by the one process that places engines and read by every front. Owns the
file's form and how a front follows it. Knows nothing of how engines are placed.
"""

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.engine.client import ZmqClient
from shoal.engine.curve import KeyPair, client_options
from shoal.engine.link import EngineAddress

log = logging.getLogger(__name__)

NAME = "members"  # the file's, in the private folder
LOOK_S = 0.1  # between two looks at the file


@dataclass(frozen=True)
class Member:
    """An engine that can be reached. One that was restarted elsewhere is another member of the same number."""

    number: int
    url: str
    server_key: str  # public

    def address(self, own: KeyPair) -> EngineAddress:
        return EngineAddress(self.number, self.url, options=client_options(own, self.server_key))


@dataclass(frozen=True)
class Membership:
    """The members, and how often each number was started so far: a number's epochs must grow, whoever starts it."""

    members: tuple[Member, ...] = ()
    starts: Mapping[int, int] | None = None

    def write(self, folder: Path) -> None:
        """As a whole: a reader finds the old file or the new one."""
        text = json.dumps({"members": [asdict(one) for one in self.members], "starts": dict(self.starts or {})})
        draft = folder / f"{NAME}.new"
        draft.write_text(text)
        os.replace(draft, folder / NAME)

    @classmethod
    def read(cls, folder: Path) -> "Membership":
        """Empty if there is none yet."""
        try:
            found = json.loads((folder / NAME).read_text())
            members = tuple(Member(**one) for one in found["members"])
            return cls(members, {int(number): int(count) for number, count in found["starts"].items()})
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.error("the members file cannot be read, so no engines are known: %s", error)
            return cls()


class Follower:
    """Keeps a client's engines those of the members file."""

    def __init__(self, client: ZmqClient, folder: Path, own: KeyPair) -> None:
        self._client = client
        self._folder = folder
        self._own = own
        self._seen: tuple[int, int] | None = None  # the file's identity
        self._known: dict[int, Member] = {}

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # the next version must be followed, too
                log.exception("the engines of the members file could not be followed")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Follow the file if it has changed."""
        try:
            found = (self._folder / NAME).stat()
        except OSError:
            return  # not written yet, or the folder is being recreated: engines that are known stay
        if (found.st_ino, found.st_mtime_ns) != self._seen:
            self._seen = (found.st_ino, found.st_mtime_ns)
            await self.follow(Membership.read(self._folder).members)

    async def follow(self, members: Sequence[Member]) -> None:
        now = {one.number: one for one in members}
        added = [one for number, one in now.items() if self._known.get(number) != one]
        gone = [number for number, one in self._known.items() if now.get(number) != one]
        self._known = now
        for number in gone:
            if number not in now:
                log.debug("engine %d has left", number)
            await self._client.remove_engine(number)
        for one in added:  # last: their jobs must find the others
            log.debug("engine %d is at %s", one.number, one.url)
            self._client.add_engine(one.address(self._own))
