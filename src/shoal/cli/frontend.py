"""shoal bench frontend: tokens per second through the fronts, and the delay they add."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.cli.common import new_command
from shoal.cli.serve import address, check_socket_paths, listen, make_children
from shoal.config.engine import EngineConfig
from shoal.config.serve import ServeConfig
from shoal.errors import EngineError


def add_frontend(kinds: Any) -> None:
    parser = new_command(
        kinds,
        "frontend",
        "stream from a paced engine through the real fronts: tokens per second, and the delay they add",
        "shoal bench frontend --streams 256 --rates 6000,12000,16000",
        run_frontend,
    )
    parser.add_argument("--streams", type=int, default=256, help="streams open at once (default: 256)")
    parser.add_argument(
        "--rates", default="6000,12000", metavar="R,R", help="tokens per second offered, all streams together"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each rate (default: 10)")
    parser.add_argument("--api-workers", type=int, default=1, help="front processes (default: 1)")
    parser.add_argument(
        "--pin",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the fronts on the first core, everything else on the others",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run_frontend(args: argparse.Namespace) -> int:
    from shoal.bench.cpu_noise import banner, noise_in
    from shoal.cli.loads import numbers

    rows = []
    for rate in numbers(args.rates, "--rates"):
        if rate <= 0:
            raise EngineError("--rates must be above 0")
        rows.append(measure(args, rate))
        if not args.json:
            print(one_line(rows[-1]), flush=True)
    if args.json:
        print(json.dumps(rows))
    elif headline := banner([noise_in(row) for row in rows]):
        print(headline)
    return 0


def measure(args: argparse.Namespace, rate: float, rounds: int = 1, model: str | None = None) -> dict[str, Any]:
    """One rate, with new processes. `rounds`: how often all streams are opened and read, one after the other. `model`:
    whose tokenizer the fronts use; None: the default model."""
    from shoal.bench.cpu_noise import NoiseWatch, noise_figures
    from shoal.bench.frontend import figures, run_streams
    from shoal.machine.cpus import allowed_cpus

    tokens = max(2, round(rate * args.seconds / args.streams))
    serve = ServeConfig(port=0, api_workers=args.api_workers, log_level="warning")
    engine = EngineConfig(
        model=model, max_num_seqs=args.streams, max_num_batched_tokens=4 * args.streams, prefix_caching=False
    )
    check_socket_paths(tempfile.gettempdir())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        listener = stack.enter_context(listen(serve))
        paced = {"tick_s": args.streams / rate, "kv_tokens": args.streams * (tokens + 64), "save": str(folder / "sent")}
        real, *fronts = make_children(engine, serve, folder, listener)
        paced_engine = replace(
            real, module="shoal.bench.paced_engine", config=lambda life: {**real.config(life), "paced": paced}
        )
        processes = [stack.enter_context(Running(child)) for child in [paced_engine, *fronts]]
        host, port = listener.getsockname()[:2]
        cpus = allowed_cpus()  # before this process is pinned to some of them
        if args.pin:
            pin(processes)
        wait_healthy(address(serve, listener))
        watch = NoiseWatch(cpus=cpus)
        idle_s = sum(cpu_seconds(process.pid) for process in processes[1:])  # to start
        seen = run_streams(host, port, args.streams, tokens)
        for _ in range(rounds - 1):
            seen.add(run_streams(host, port, args.streams, tokens))
        noise = noise_figures(watch.noise())
        cpu_s = sum(cpu_seconds(process.pid) for process in processes[1:]) - idle_s
        for process in reversed(processes):  # the engine last; it writes its emission times
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        found = figures(json.loads((folder / "sent").read_text()), seen, rate)
    return {**found, **noise, "front_cpu_us_per_token": round(cpu_s / max(found.get("tokens", 1), 1) * 1e6, 1)}


class Running:
    """A child process, ready on entry and ended on exit."""

    def __init__(self, child: Any) -> None:
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", child.module], stdin=subprocess.PIPE, pass_fds=[write, *child.fds]
        )
        os.close(write)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**child.config(0), "ready_fd": write}).encode())
        self.process.stdin.close()
        message = os.read(read, 64)
        os.close(read)
        if not message:
            raise EngineError(f"{child.name} did not start")

    def __enter__(self) -> "subprocess.Popen[bytes]":
        return self.process

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def pin(processes: "list[subprocess.Popen[bytes]]") -> None:
    """Fronts on the first core, the rest on the others; with a single core, all share it."""
    if not hasattr(os, "sched_setaffinity"):
        return
    first, *others = sorted(os.sched_getaffinity(0))
    for process in processes[1:]:
        for thread in os.listdir(f"/proc/{process.pid}/task"):
            os.sched_setaffinity(int(thread), {first})
    for pid in (processes[0].pid, 0):
        os.sched_setaffinity(pid, set(others) or {first})


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process has used so far."""
    try:
        parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def wait_healthy(url: str) -> None:
    import time
    import urllib.error
    import urllib.request

    for _ in range(200):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise EngineError("the server did not become healthy")


def one_line(row: dict[str, Any]) -> str:
    if not row["tok_s"]:
        return f"offered {row['offered_tok_s']:,.0f} tok/s: nothing arrived; {row['problems']}"
    from shoal.bench.cpu_noise import noise_in

    delay, noise = row["delay_ms"], noise_in(row)
    return (
        f"offered {row['offered_tok_s']:,.0f} tok/s: {row['tok_s']:,.0f} arrived "
        f"({row['tok_s'] / row['offered_tok_s']:.0%}), "
        f"added delay p50 {delay['p50']:.1f} p90 {delay['p90']:.1f} p99 {delay['p99']:.1f} ms, "
        f"{row['front_cpu_us_per_token']:.0f} µs of the fronts' CPU per token"
        + (f"; {noise.remark()}" if noise and noise.remark() else "")
        + (f"; {row['missing']} missing, {len(row['problems'])} problems" if row["missing"] or row["problems"] else "")
    )
