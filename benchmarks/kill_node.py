"""Does a stream notice that a machine of its cluster dies, while another one is up?

    python -m benchmarks.kill_node MODEL -- --max-num-seqs 128 --kv-memory 600MiB

Needs the extra `cluster`. Two nodes of a Ray cluster, both on this machine, and a real `shoal serve --cluster ray` of
the model in float32 with an engine on each; what follows -- goes to it. Every stream runs undisturbed, then again while
all processes of the second node are killed by SIGKILL. Prints what kill_replicas.py prints: how many answers differ
(none may), and the longest gap between two events of a stream. Exit code 1 if an answer differs or fails.
"""

import argparse
import asyncio
import sys
import time
import urllib.request
from pathlib import Path

root = Path(__file__).parents[1]
sys.path[:0] = [str(root), str(root / "benchmarks")]

from kill_replicas import AROUND_S, Answer, Fire, figures  # noqa: E402
from restart_bf16 import Server  # noqa: E402

from tests.cluster.ray_nodes import RayNodes, ray_cluster  # noqa: E402


def wait_for_engines(url: str, count: int) -> None:
    while True:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        if sum(line.startswith("shoal_engine_up") and line.endswith(" 1.0") for line in lines) >= count:
            return
        time.sleep(0.2)


async def while_a_node_dies(fire: Fire, nodes: RayNodes, after_s: float) -> list[list[Answer]]:
    running = asyncio.create_task(fire.once())
    await asyncio.sleep(after_s)
    await asyncio.to_thread(nodes.nodes[1].kill)
    fire.kills.append(time.monotonic())
    return [[answer] for answer in await running]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, .gguf file or hub name")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=400, help="of the longest answer (default: %(default)s)")
    parser.add_argument("--after", type=float, default=1.0, metavar="S", help="before the kill (default: %(default)s)")
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    with ray_cluster(head_cpus=1) as nodes:
        nodes.add()
        cluster = ("--cluster", "ray", "--cluster-address", nodes.address, "--engine-cpus", "1", "--replicas", "2")
        server = Server(args.model, "--dtype", "float32", "--log-level", "warning", *cluster, *flags)
        try:
            wait_for_engines(server.url, 2)
            fire = Fire(server, args.streams, args.tokens, up=2)
            quiet = asyncio.run(fire.once())
            assert not any(one.failure for one in quiet), [one.failure for one in quiet if one.failure][:3]
            found = figures(fire, quiet, asyncio.run(while_a_node_dies(fire, nodes, args.after)))
        finally:
            server.close()
    found["longest_gap_around_kills_s"] = [round(gap, 3) for gap in found["longest_gap_around_kills_s"]]
    for name, value in found.items():
        print(f"{name:<32}{value}")
    print(f"gaps that begin up to {AROUND_S:g} s after the kill count as around it")
    return 1 if found["failed"] or found["different"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
