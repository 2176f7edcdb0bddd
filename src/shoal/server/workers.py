"""Threads for work that is too long for the event loop.

Owns two small pools of the process: one for Python code (reading large bodies, composing large answers), one for
tokenizing, which releases the interpreter lock. They are few on purpose: every busy thread delays the event loop by its
share of the lock, and every text being tokenized takes memory. Work in PYTHON consists of pieces of a few milliseconds,
since a single call that holds the lock delays the event loop, too. Knows nothing of the work.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SHORT = 4096  # characters or ids; work up to this size takes about a millisecond and is done on the event loop
PYTHON = ThreadPoolExecutor(1, "front-python")
TOKENIZE = ThreadPoolExecutor(2, "front-tokenize")
T = TypeVar("T")


async def off_loop(size: int, work: Callable[[], T], pool: ThreadPoolExecutor = TOKENIZE, short: int = SHORT) -> T:
    """Do small work at once and large work in a thread, off the event loop."""
    if size <= short:
        return work()
    return await asyncio.get_running_loop().run_in_executor(pool, work)
