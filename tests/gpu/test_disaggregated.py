"""CUDA IPC on a real GPU: blocks go from one process to another on the card, and a server hands requests over."""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shoal.core.plan import BlockCopy
from shoal.disagg.transport import PeerOutboxes
from shoal.models.spec import spec_from_config
from shoal.runner.copier import Copier
from shoal.runner.kvstore import KVStore, bytes_per_block

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

LLAMA_8B = {  # 128 KiB of KV per token in bfloat16: 8,192 tokens are 1 GiB
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
BLOCKS, BLOCK = 512, 16

CHILD = """
import sys, torch
from pathlib import Path
from shoal.core.plan import BlockCopy
from shoal.disagg.cuda_ipc import CudaOutbox
from shoal.disagg.transport import SharedOutbox
from shoal.models.spec import spec_from_config
from shoal.runner.copier import Copier
from shoal.runner.kvstore import KVStore, bytes_per_block
from tests.gpu.test_disaggregated import BLOCK, BLOCKS, LLAMA_8B, name, place, scribble
spec, dtype = spec_from_config(LLAMA_8B), getattr(torch, sys.argv[3])
kind = {"cuda": CudaOutbox, "unix": SharedOutbox}[sys.argv[2]]
outbox = kind(Path(sys.argv[1]), BLOCKS, bytes_per_block(spec, BLOCK, dtype))
store = KVStore(spec, BLOCKS, BLOCK, dtype, "cuda", outbox=outbox)
scribble(store)
copier, every = Copier(store), tuple(range(BLOCKS))
for number in range(3):
    copier.submit(BlockCopy(number, every, tuple(map(place, every)), "out", tuple(map(name, every))))
    (done, failed) = copier.take(all_of_them=True)
    assert not failed
print(outbox.address, done[0][1], flush=True)
sys.stdin.read()
"""


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def place(number: int) -> int:
    """In the outbox, of a block of the cache."""
    return (5 * number + 3) % BLOCKS


def scribble(store: KVStore) -> None:
    """The same bytes in every process."""
    store.data.view(torch.uint8).random_(generator=torch.Generator("cuda").manual_seed(1))
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", ["cuda", "unix"])
def test_a_gibibyte_of_blocks_goes_to_another_process(
    kind: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    command, env = [sys.executable, "-c", CHILD, str(tmp_path), kind, dtype], {**os.environ, "PYTHONPATH": path}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    from shoal.disagg.cuda_ipc import CudaPeer

    with subprocess.Popen(command, text=True, cwd=root, env=env, **pipes) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        address, sent_s = child.stdout.readline().split()
        assert address.startswith(f"{kind}:")
        spec, kept = spec_from_config(LLAMA_8B), getattr(torch, dtype)
        store = KVStore(spec, BLOCKS, BLOCK, kept, "cuda", peers=PeerOutboxes({"cuda": CudaPeer}))
        scribble(store)
        copier, taken, wanted = Copier(store), [], store.data.clone()
        for number in range(6):
            store.data.zero_()
            torch.cuda.synchronize()
            every = tuple(range(BLOCKS))
            begun_s = time.perf_counter()
            names, places = tuple(map(name, every)), tuple(map(place, every))
            copier.submit(BlockCopy(number, places, every, "in", names, address))
            done, failed = copier.take(all_of_them=True)
            taken.append(time.perf_counter() - begun_s)
            assert not failed
            assert done
            came = store.data.view(torch.uint8)[:, :, :BLOCKS]  # less the scratch block
            assert torch.equal(came, wanted.view(torch.uint8)[:, :, :BLOCKS])
        whole = BLOCKS * bytes_per_block(spec, BLOCK, kept)
        with capsys.disabled():
            best = statistics.median(taken[1:])
            print(
                f"\n{kind}, {dtype}: {whole / 2**30:.2f} GiB leave in {float(sent_s) * 1e3:.1f} ms "
                f"and arrive in {best * 1e3:.1f} ms, {whole / best / 1e9:.0f} GB/s"
            )
        child.stdin.close()
        copier.close()


@pytest.mark.slow
def test_a_server_on_one_card_hands_requests_over(tmp_path: Path) -> None:
    from tests.story.models import save_model
    from tests.story_server.servers import running
    from tests.story_server.test_crash import all_answers, asks
    from tests.story_server.test_disaggregated import ARRIVED, LOST, down

    model = save_model(tmp_path / "model")
    common = ("--device", "cuda", "--dtype", "float32", "--kv-memory", "256MiB", "--served-model-name", "tiny")
    flags = (*common, "--max-model-len", "512")
    with running(tmp_path / "one", model, *flags) as server:
        alone = asyncio.run(all_answers(server, asks(12, 60), lambda: None))
    with running(tmp_path / "two", model, *flags, "--prefill", "disaggregated") as server:
        server.wait_for("both engines", lambda: not down(server), 240)
        got = asyncio.run(all_answers(server, asks(12, 60), lambda: None))
        assert [status for status, _ in got] == [200] * 12
        same = sum(one == other for one, other in zip(got, alone, strict=True))
        assert same >= 10, "floating point may differ where batches do, in a few texts at most"
        assert server.metrics()[ARRIVED] > 12
        assert server.metrics()[LOST] == 0
