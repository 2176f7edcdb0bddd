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
from shoal.models.spec import spec_from_config
from shoal.runner.kvstore import KVStore, bytes_per_block
from tests.gpu.test_disaggregated import BLOCK, BLOCKS, LLAMA_8B, name
spec = spec_from_config(LLAMA_8B)
outbox = CudaOutbox(Path(sys.argv[1]), BLOCKS, bytes_per_block(spec, BLOCK, torch.bfloat16))
store = KVStore(spec, BLOCKS, BLOCK, torch.bfloat16, "cuda", outbox=outbox)
for block in range(BLOCKS):
    store.data[:, :, block] = block
torch.cuda.synchronize()
names = tuple(map(name, range(BLOCKS)))
store.copy(BlockCopy(0, tuple(range(BLOCKS)), tuple(range(BLOCKS)), "out", names))
print(outbox.address, flush=True)
sys.stdin.read()
"""


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_gibibyte_of_blocks_goes_to_another_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    command, env = [sys.executable, "-c", CHILD, str(tmp_path)], {**os.environ, "PYTHONPATH": path}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    from shoal.disagg.cuda_ipc import CudaPeer

    with subprocess.Popen(command, text=True, cwd=root, env=env, **pipes) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        address = child.stdout.readline().strip()
        assert address.startswith("cuda:")
        spec = spec_from_config(LLAMA_8B)
        store = KVStore(spec, BLOCKS, BLOCK, torch.bfloat16, "cuda", peers=PeerOutboxes({"cuda": CudaPeer}))
        copier, taken = Copier(store), []
        for number in range(6):
            store.data.zero_()
            torch.cuda.synchronize()
            every = tuple(range(BLOCKS))
            begun_s = time.perf_counter()
            copier.submit(BlockCopy(number, every, every, "in", tuple(map(name, every)), address))
            done, failed = copier.take(all_of_them=True)
            taken.append(time.perf_counter() - begun_s)
            assert not failed
            assert done
            for block in (0, 1, 255, BLOCKS - 1):
                assert (store.data[:, :, block] == block).all()
        whole = BLOCKS * bytes_per_block(spec, BLOCK, torch.bfloat16)
        with capsys.disabled():
            best = statistics.median(taken[1:])
            print(f"\nCUDA IPC: {whole / 2**30:.2f} GiB in {best * 1e3:.1f} ms, {whole / best / 1e9:.0f} GB/s")
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
