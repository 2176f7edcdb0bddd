"""Weights in 4 bits on a GPU: products against their meaning at the sizes of real models, and whole engines."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import LLM, SamplingParams
from shoal.kernels.block_weight import BlockWeight, quantize_int4
from shoal.kernels.ref import RefOps
from tests.files.ggufs import Q, hf_weights, write
from tests.kernels.blocks import a_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REF = RefOps()
SIZES = [(4096, 6144), (14336, 4096), (1024, 4096), (3072, 1024), (576, 960), (1536, 576), (160, 72)]


@pytest.fixture(scope="module")
def ops() -> Any:
    from shoal.kernels.triton import TritonOps

    return TritonOps()


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("group", [32, 128, 1 << 20])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 128, 129, 700])
def test_products(ops: Any, inputs: int, outputs: int, group: int, rows: int) -> None:
    torch.manual_seed(rows)
    weight = a_weight(outputs, inputs, group=group).to("cuda")
    x = (torch.randn(rows, inputs, device="cuda") * inputs**-0.5).to(torch.bfloat16)
    bias, residual = (torch.randn(size, device="cuda").to(torch.bfloat16) for size in ((outputs,), (rows, outputs)))
    wanted = REF.linear(x.float(), weight, None)
    for found, more in (
        (ops.linear(x, weight, None), 0),
        (ops.linear(x, weight, bias), bias.float()),
        (ops.linear_add(x, weight, None, residual.clone()), residual.float()),
    ):
        apart = (found.float() - wanted - more).norm() / (wanted + more).norm()
        assert apart < 1e-2, float(apart)


@pytest.mark.parametrize("rows", [1, 16, 129])
def test_products_in_a_graph(ops: Any, rows: int) -> None:
    """Recorded and replayed with other inputs."""
    weight = quantize_int4(torch.randn(4096, 1024, device="cuda"))
    x = torch.zeros(rows, 1024, device="cuda", dtype=torch.bfloat16)
    ops.linear(x, weight, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.linear(x, weight, None)
    for seed in (1, 2):
        torch.manual_seed(seed)
        x.copy_(torch.randn(rows, 1024))
        graph.replay()
        wanted = REF.linear(x.float(), weight, None)
        assert (out.float() - wanted).norm() / wanted.norm() < 1e-2


def logprobs(path: Path, **options: Any) -> list[float]:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(str(path), dtype="bfloat16", kv_memory=2**26, max_model_len=256, **options) as llm:
        first = llm.generate([[5, 6, 7] * 20], params)[0].prompt_logprobs or []
        llm.generate([[n] * 9 for n in range(5, 37)], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    return [one.logprob for one in first if one is not None]


def test_a_whole_engine(tmp_path: Path) -> None:
    """A GGUF file kept in 4 bits and widened: near each other, prompts and decodes of many sizes."""
    weights = {name: values / 16 if values.ndim == 2 else values for name, values in hf_weights("llama").items()}
    path = write(tmp_path / "m.gguf", "llama", weights, Q.Q4_0, kinds={"lm_head.weight": Q.Q8_0})
    widened, kept = logprobs(path, device="cuda"), logprobs(path, device="cuda", quantization="int4")
    assert max(abs(one - two) for one, two in zip(widened, kept, strict=True)) < 0.2


def test_what_is_kept(tmp_path: Path) -> None:
    """Embedding and head, and what is in 8 bits, are numbers."""
    from shoal.build import load
    from shoal.config.engine import EngineConfig

    path = write(tmp_path / "m.gguf", "llama", hf_weights("llama"), Q.Q4_1)
    model: Any = load(EngineConfig(model=str(path), quantization="int4", device="cuda", dtype="bfloat16")).model
    assert isinstance(model.layers[0].attention.qkv.weight, BlockWeight)
    assert not isinstance(model.embedding, BlockWeight)
    assert not isinstance(model.head, BlockWeight)
