"""CPU noise: how much of the machine's CPU other programs took during a measurement.

A benchmark beside a compiler run measures the compiler. Owns the counting (Linux only; 0 elsewhere). Knows no engines.
"""

import os
import time
from pathlib import Path

DISTURBED = 0.05  # of all cores together: a run with more noise than this is not reliable


class NoiseWatch:
    """Counts from its creation on.

    >>> watch = NoiseWatch()
    >>> 0.0 <= watch.others() <= 1.0
    True
    """

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._busy_s, self._own_s = busy_seconds(), own_seconds()

    def others(self) -> float:
        """Share of the machine's CPU time that other programs took."""
        elapsed_s = max(time.monotonic() - self._begun_s, 1e-9)
        others_s = (busy_seconds() - self._busy_s) - (own_seconds() - self._own_s)
        return min(1.0, max(0.0, others_s / (elapsed_s * (os.cpu_count() or 1))))


def busy_seconds() -> float:
    """Busy CPU seconds of the whole machine, including stolen ones; 0 where they are not counted."""
    try:
        parts = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, parts)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process and its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
