"""How fast KV blocks go from one engine to another: python benchmarks/kv_transport.py [--blocks N]

A second process fills an outbox, as a prefill engine does; this one copies its blocks into a KV cache, as a decode
engine does: over shared memory, over TCP on this machine, and over TCP with CURVE, as between machines. Beside each
figure: its share of what one thread's plain copy of the same bytes reaches in the same run, in turns with it. The best
of all rounds counts: a busy machine makes the others longer, and long ones more so. The time that a core is busy for a
gigabyte, on either side, depends less on what else runs there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.core.plan import BlockCopy
from shoal.disagg.transport import PeerOutboxes, SharedOutbox, TcpOutbox
from shoal.engine.curve_outbox import CurveOutbox, open_nearest
from shoal.models.spec import spec_from_config
from shoal.runner.kvstore import KVStore, bytes_per_block

CONFIG = {  # SmolLM2-135M
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip
BLOCK_SIZE = 16
KINDS = ("shm", "tcp", "curve")


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def make(kind: str, folder: Path, blocks: int, size: int) -> Any:
    if kind == "shm":
        return SharedOutbox(folder, blocks, size)
    return TcpOutbox(blocks, size) if kind == "tcp" else CurveOutbox("127.0.0.1", blocks, size)


def serve(kind: str, folder: Path, blocks: int, size: int) -> None:
    """The other process: an outbox full of blocks."""
    outbox = make(kind, folder, blocks, size)
    for block in range(blocks):
        outbox.memory[block] = block % 251
        outbox.label(block, name(block))
    print(outbox.address, flush=True)
    for _ in sys.stdin:  # each line is a question
        print(cpu_s(), flush=True)


def cpu_s() -> float:
    """Of all threads of this process, so far."""
    now = os.times()
    return now.user + now.system


def copy_s(store: KVStore, source: torch.Tensor) -> float:
    """A plain copy of as many bytes, in one thread."""
    target = store.data.view(-1)[: source.numel()]
    begun_s = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begun_s


def fetch_s(store: KVStore, address: str, blocks: int) -> float:
    order = BlockCopy(0, tuple(range(blocks)), tuple(range(blocks)), "in", tuple(map(name, range(blocks))), address)
    begun_s = time.perf_counter()
    store.copy(order)
    return time.perf_counter() - begun_s


def measure(kind: str, store: KVStore, blocks: int, size: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--serve", kind, folder, str(blocks), str(size)]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdin is not None
        address = other.stdout.readline().strip()

        def sender_cpu_s() -> float:
            print(file=other.stdin, flush=True)
            return float(other.stdout.readline())  # type: ignore[union-attr]

        source = torch.from_numpy(np.ones(blocks * size, dtype=np.uint8)).view(store.data.dtype)
        fetch_s(store, address, blocks)  # maps pages, opens the connection
        copy_s(store, source)
        times, plain, reader_s, before_s = [], [], 0.0, sender_cpu_s()
        for _ in range(rounds):
            begun_s = cpu_s()
            times.append(fetch_s(store, address, blocks))
            reader_s += cpu_s() - begun_s
            plain.append(copy_s(store, source))
        sender_s = sender_cpu_s() - before_s
        right = all(
            bool((store.data[:, :, block].contiguous().view(torch.uint8) == block % 251).all())
            for block in (0, blocks - 1)
            if fetch_s(store, address, blocks)
        )
        assert right, "other bytes came than were sent"
        other.stdin.close()
        other.wait()
    taken, whole = min(times), blocks * size
    return {
        "gb_s": whole / taken / 1e9,
        "memcpy_gb_s": whole / min(plain) / 1e9,
        "share": min(plain) / taken,
        "ms_per_1k_tokens": taken / (blocks * BLOCK_SIZE) * 1e6,
        "sender_cpu_s_per_gb": sender_s / (rounds * whole / 1e9),
        "reader_cpu_s_per_gb": reader_s / (rounds * whole / 1e9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=512, help="blocks of one transfer (default: 512, 8,192 tokens)")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    if args.serve:
        kind, folder, blocks, size = args.serve
        serve(kind, Path(folder), int(blocks), int(size))
        return
    torch.set_num_threads(1)
    spec = spec_from_config(CONFIG)
    size = bytes_per_block(spec, BLOCK_SIZE, torch.bfloat16)
    store = KVStore(spec, args.blocks, BLOCK_SIZE, torch.bfloat16, "cpu", peers=PeerOutboxes({"curve": open_nearest}))
    whole = args.blocks * size / 2**20
    print(f"{args.blocks} blocks of {size / 2**10:.0f} KiB, {whole:.0f} MiB together; best of {args.rounds} transfers")
    for kind in KINDS:
        found = measure(kind, store, args.blocks, size, args.rounds)
        print(
            f"{kind:5}  {found['gb_s']:5.2f} GB/s   plain copy {found['memcpy_gb_s']:5.2f} GB/s   "
            f"{found['share']:.0%} of it   {found['ms_per_1k_tokens']:.1f} ms per 1,000 tokens   "
            f"busy {found['sender_cpu_s_per_gb']:.2f} + {found['reader_cpu_s_per_gb']:.2f} s per GB"
        )
        print(json.dumps({"transport": kind, **found}))
    store.close()


if __name__ == "__main__":
    main()
