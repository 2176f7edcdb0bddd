"""How long is an engine away after a kill, with and without a spare process?

    python benchmarks/restart_time.py MODEL --kills 3 --rounds 2 -- --dtype float32 --threads 1

Starts a server each way in turn, kills its engine a few times, and prints the seconds until the next engine answers;
what follows -- goes to the server. Before each kill it waits until a spare process is loaded (--pause).
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time

from restart_bf16 import Server

WAYS = {"with a spare process": "--spare-engine", "without": "--no-spare-engine"}


def away_s(server: Server) -> float:
    """Kill the engine; the time until another one answers."""
    before, began_s = server.restarts(), time.monotonic()
    os.kill(server.engine(), signal.SIGKILL)
    while server.restarts() <= before:
        time.sleep(0.01)
    return time.monotonic() - began_s


def measured(way: str, args: argparse.Namespace) -> list[float]:
    server = Server(args.model, WAYS[way], *args.flags)
    try:
        found = []
        for _ in range(args.kills):
            time.sleep(args.pause)
            found.append(away_s(server))
        return found
    finally:
        server.process.terminate()
        server.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kills", type=int, default=3, help="per server (default: 3)")
    parser.add_argument("--rounds", type=int, default=2, help="servers of each kind, in turn (default: 2)")
    parser.add_argument("--pause", type=float, default=12.0, help="seconds before each kill (default: 12)")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    args.flags = flags
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            found[way] += measured(way, args)
    if args.json:
        print(json.dumps(found))
        return
    medians = [statistics.median(times) for times in found.values()]
    for (way, times), median in zip(found.items(), medians, strict=True):
        print(f"{way:22} median {median:6.2f} s   {', '.join(f'{one:.2f}' for one in sorted(times))}")
    print(f"ratio of the medians {medians[1] / medians[0]:.1f}")


if __name__ == "__main__":
    main()
