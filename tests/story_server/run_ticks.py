"""CPU time of one thread that a stalled virtual machine does not disturb.

The clock of a thread's CPU time runs on while a host holds the virtual core: a stall of 100 ms looks like 100 ms of
work. A timer that fires each millisecond in which the thread runs fires once after such a stall. So its firings are
counted: samples of the kernel's event `cpu-clock`, which needs neither hardware counters nor, as a rule, root.
"""

import ctypes
import mmap
import platform
import struct

TICK_S = 0.001
PAGES = 64  # of samples; read often enough, they never run full
SAMPLE_BYTES = 16  # a header and an address
CALLS = {"aarch64": 241, "x86_64": 298}  # perf_event_open
USER_ONLY = 0b11 << 5  # without the kernel and the hypervisor: what an ordinary user may ask for
HEAD, TAIL = 1024, 1032  # offsets in the first page


def open_event(flags: int) -> int:
    """A file descriptor that samples the calling thread, or a negative number."""
    attributes = bytearray(128)
    software, cpu_clock, address = 1, 0, 1
    struct.pack_into("IIQQQ", attributes, 0, software, len(attributes), cpu_clock, round(TICK_S * 1e9), address)
    struct.pack_into("Q", attributes, 40, flags)
    buffer = (ctypes.c_char * len(attributes)).from_buffer(attributes)
    call = CALLS.get(platform.machine())
    return -1 if call is None else int(ctypes.CDLL(None).syscall(call, buffer, 0, -1, -1, 8))


class Ticks:
    """Counts the milliseconds in which the thread that made it has run."""

    def __init__(self) -> None:
        event = open_event(0)
        event = open_event(USER_ONLY) if event < 0 else event
        if event < 0:
            raise OSError("this kernel does not let us sample a thread")
        size = mmap.PAGESIZE * (1 + PAGES)
        pages = mmap.mmap(event, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._head = ctypes.c_uint64.from_buffer(pages, HEAD)
        self._tail = ctypes.c_uint64.from_buffer(pages, TAIL)

    def ran_s(self) -> float:
        """Since the last call."""
        head, tail = self._head.value, self._tail.value
        self._tail.value = head
        return (head - tail) // SAMPLE_BYTES * TICK_S


class NoTicks:
    """Where the kernel does not allow it: nothing is known."""

    def ran_s(self) -> float:
        return float("inf")


def ticks() -> Ticks | NoTicks:
    try:
        return Ticks()
    except OSError:
        return NoTicks()
