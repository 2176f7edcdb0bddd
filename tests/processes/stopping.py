"""Stop a process as a debugger would, for tests of what its neighbours do then."""

import os
import signal
import time
from pathlib import Path


def stop(pid: int) -> None:
    """Returns when no thread of it runs any more.

    The signal alone only asks for that: one thread takes it and tells the others, so on a busy machine a thread may
    answer a few requests more.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    while tasks.exists() and not all(map(_is_stopped, tasks.iterdir())):
        time.sleep(0.001)


def _is_stopped(task: Path) -> bool:
    """Or has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True
