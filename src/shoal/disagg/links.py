"""Links: what connects one engine with engines of the other role.

Owns the engine's outbox, once its size is known, and its way to the outboxes of others. An engine without a role has
neither. Knows no requests; loads torch only for blocks on a GPU.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.core.names import pick
from shoal.core.ports import BlockOutbox, BlockReader
from shoal.disagg.handoff import DECODE, PREFILL, ROLES
from shoal.disagg.transport import PeerOutboxes, SharedOutbox, TcpOutbox

MakeOutbox = Callable[[int, int], BlockOutbox]


class KVLinks:
    """Of one engine."""

    def __init__(self, role: str = "", make_outbox: MakeOutbox | None = None, peers: BlockReader | None = None) -> None:
        """`make_outbox`: from the number of blocks and the bytes of one."""
        self.role = role
        self.peers = peers
        self._make_outbox = make_outbox
        self._outbox: BlockOutbox | None = None

    @property
    def has_outbox(self) -> bool:
        return self._make_outbox is not None

    @property
    def address(self) -> str:
        """Of the outbox; "": there is none."""
        return "" if self._outbox is None else self._outbox.address

    def outbox(self, blocks: int, block_bytes: int) -> BlockOutbox | None:
        """Make it; None if this engine has none."""
        if self._make_outbox is not None:
            self._outbox = self._make_outbox(blocks, block_bytes)
        return self._outbox


def links_of(role: str, transport: str, folder: Path) -> KVLinks:
    """Of an engine of this role (""): none, whose own folder this is, to engines on the same machine."""
    if not role:
        return KVLinks()
    pick(dict.fromkeys(ROLES), role, "role")
    kinds: dict[str, MakeOutbox] = {
        "shm": lambda blocks, size: SharedOutbox(folder, blocks, size),
        "tcp": lambda blocks, size: TcpOutbox(blocks, size),
        "cuda-ipc": lambda blocks, size: _cuda().CudaOutbox(folder, blocks, size),
    }
    make = pick(kinds, transport, "KV transport")
    if role == PREFILL:
        return KVLinks(PREFILL, make)
    return KVLinks(DECODE, peers=PeerOutboxes({"cuda": lambda path: _cuda().CudaPeer(path)}))


def _cuda() -> Any:
    from shoal.disagg import cuda_ipc  # loads torch

    return cuda_ipc
