"""What rank 0 sends to the other ranks, and what they answer: frames over a socket pair.

    frame      kind (1 byte) │ length of the rest (8 bytes) │ the rest
    PASS       a StepPlan as one array of int64: sizes first, then its arrays, end to end
    ASK, TELL  a question of rank 0 and its answer, as JSON
    BEAT       from a rank, every second: its process lives

A plan is sent once per pass, and without what only sampling needs: rank 0 samples alone. Nothing is pickled. A socket
pair of the kernel, because it keeps the order, blocks when a rank falls behind, and ends when either process does.
Knows plans and sockets; does not know processes.
"""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.core.params import SamplingParams
from shoal.core.plan import BlockCopy, Ints, RowStart, StepPlan

PASS, ASK, TELL, BEAT = b"p", b"a", b"t", b"."
_HEAD = struct.Struct("=cQ")
_DIRECTIONS = ("out", "in")
_PARAMS = SamplingParams()  # of rows on ranks that do not sample


def send(to: socket.socket, kind: bytes, data: bytes = b"") -> None:
    """Send one frame."""
    to.sendall(_HEAD.pack(kind, len(data)) + data)


def receive(source: socket.socket) -> tuple[bytes, bytes] | None:
    """The next frame: kind and data; None: the other side has ended."""
    head = _read(source, _HEAD.size)
    if head is None:
        return None
    kind, size = _HEAD.unpack(head)
    data = _read(source, size)
    return None if data is None else (kind, data)


def tell(to: socket.socket, values: Mapping[str, Any]) -> None:
    send(to, TELL, json.dumps(values).encode())


def _read(source: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = source.recv(size - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def pack(plan: StepPlan) -> bytes:
    """A plan for ranks that do not sample."""
    numbers: list[int] = []
    for start in plan.starting:
        prompt = start.prompt_len if start.needs_prompt_logprobs else 0
        numbers += (start.row, start.generation, prompt, len(start.blocks), *start.blocks)
    for copy in plan.copies:
        pairs = (*copy.source, *copy.target)
        numbers += (copy.id, _DIRECTIONS.index(copy.direction), len(copy.source), *pairs)
    sizes = (plan.step, len(plan.starting), len(plan.copies), len(numbers), len(plan.grown), len(plan.rows))
    head = np.array((*sizes, len(plan.tokens), plan.width, plan.dead, *numbers), dtype=np.int64)
    arrays = (plan.grown.reshape(-1), plan.rows, plan.generations, plan.starts, plan.counts, plan.draws, plan.tokens)
    return np.concatenate((head, *arrays)).tobytes()


def unpack(data: bytes) -> StepPlan:
    """The plan again; its rows start with neutral sampling parameters and, where prompt logprobs are asked for, with
    zeros for the prompt, whose length alone matters here."""
    values = np.frombuffer(data, dtype=np.int64).copy()  # torch takes no read-only arrays
    step, starting, copies, numbers, grown, rows, tokens, width, dead = values[:9].tolist()
    listed = values[9 : 9 + numbers].tolist()
    starts, at = _starts(listed, starting)
    found = _copies(listed, at, copies)
    arrays = np.split(values[9 + numbers :], np.cumsum([3 * grown, rows, rows, rows, rows, rows]))
    assert len(arrays[-1]) == tokens, "a plan was cut"
    blocks: Ints = arrays[0].reshape(-1, 3)
    which, generations, firsts, counts, draws, ids = arrays[1:]
    return StepPlan(step, starts, blocks, which, generations, firsts, counts, draws, ids, found, width, dead)


def _starts(listed: Sequence[int], count: int) -> tuple[tuple[RowStart, ...], int]:
    found, at = [], 0
    for _ in range(count):
        row, generation, prompt, blocks = listed[at : at + 4]
        at += 4
        held = tuple(listed[at : at + blocks])
        at += blocks
        found.append(RowStart(row, generation, (0,) * prompt, prompt, _PARAMS, 0, 0, frozenset(), held, bool(prompt)))
    return tuple(found), at


def _copies(listed: Sequence[int], at: int, count: int) -> tuple[BlockCopy, ...]:
    found = []
    for _ in range(count):
        number, direction, blocks = listed[at : at + 3]
        at += 3
        source, target = tuple(listed[at : at + blocks]), tuple(listed[at + blocks : at + 2 * blocks])
        at += 2 * blocks
        found.append(BlockCopy(number, source, target, _DIRECTIONS[direction]))
    return tuple(found)
