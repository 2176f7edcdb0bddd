"""--batch-invariant on a GPU: no bit of a row depends on its neighbours, on how its prompt is cut, or on drafts.

Everything here is compared bit for bit, in the types that models are served in.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.kernels import fp8
from shoal.kernels.weights import DenseWeight, quantize_fp8
from tests.gpu.drive import ask, greedy, opened
from tests.gpu.test_kernels import on_gpu
from tests.kernels.ragged import Tables
from tests.models.test_families import SIZES, saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MATRICES = [(4096, 6144), (4096, 4096), (14336, 4096), (1024, 4096), (3072, 1024), (2048, 1024), (576, 960), (96, 352)]
ROWS = [1, 2, 3, 7, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 200, 256, 300, 1000, 2048, 5000]


@pytest.fixture(scope="module")
def ops() -> Any:
    from shoal.kernels.triton.ordered import OrderedOps

    return OrderedOps()


@pytest.mark.parametrize(("inputs", "outputs"), MATRICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_any_number_of_rows(ops: Any, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(inputs)
    x = torch.randn(max(ROWS), inputs, device="cuda").to(dtype)
    weight = DenseWeight((torch.randn(outputs, inputs, device="cuda") / inputs**0.5).to(dtype))
    bias, residual = (
        torch.randn(outputs, device="cuda").to(dtype),
        torch.randn(len(x), outputs, device="cuda").to(dtype),
    )
    wanted = ops.linear_add(x, weight, bias, residual.clone())
    plain = x.double() @ weight.values.double().t() + bias.double() + residual.double()
    assert (wanted.double() - plain).norm() / plain.norm() < 5e-3
    for rows in ROWS:
        at = random.Random(rows).randrange(len(x) - rows + 1)
        found = ops.linear_add(x[at : at + rows], weight, bias, residual[at : at + rows].clone())
        assert torch.equal(found, wanted[at : at + rows]), rows


@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (14336, 4096), (1024, 2048)])
def test_products_in_fp8(ops: Any, inputs: int, outputs: int) -> None:
    torch.manual_seed(inputs)
    x = torch.randn(max(ROWS), inputs, device="cuda").bfloat16()
    weight = quantize_fp8(torch.randn(outputs, inputs, device="cuda") / inputs**0.5)
    wanted = ops.linear(x, weight, None)
    plain = x.float() @ weight.dense().t()
    assert (wanted.float() - plain).norm() / plain.norm() < 4e-2
    for rows in ROWS:
        at = random.Random(rows).randrange(len(x) - rows + 1)
        assert torch.equal(ops.linear(x[at : at + rows], weight, None), wanted[at : at + rows]), rows


@pytest.mark.parametrize("shape", [(32, 8, 128), (16, 8, 128), (9, 3, 64), (8, 1, 256)])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("kept", ["bfloat16", "fp8"])
def test_attention_however_a_prompt_is_cut(ops: Any, shape: tuple[int, int, int], window: int, kept: str) -> None:
    """Every query of a text: as a decode alone, among many, among drafts, and in chunks of several sizes."""
    heads, kv_heads, dim = shape
    length, others = 2300, 200
    torch.manual_seed(dim)
    tables = Tables([length] + [40] * others, 16)
    cache = [made_up(tables.blocks, kv_heads, dim, kept) for _ in range(2)]
    q = torch.randn(length, heads, dim, device="cuda").bfloat16()

    def attend(pieces: list[tuple[int, int, int]]) -> Any:
        """Queries of the text are those of their positions."""
        mine = [q[past : past + new] if which == 0 else q[:new] for which, past, new in pieces]
        return ops.attention(torch.cat(mine), *cache, on_gpu(tables.batch(pieces)), dim**-0.5, window)

    whole = attend([(0, 0, length)])
    for chunk in (64, 333, 1024, 2048):
        parts = [attend([(0, first, min(chunk, length - first))]) for first in range(0, length, chunk)]
        assert torch.equal(torch.cat(parts), whole), chunk
    beside = [(1 + at, 39, 1) for at in range(others)]
    for at in (0, 1, 63, 64, 500, 1022, 1023, 1024, 1025, 2047, 2048, 2299):
        assert torch.equal(attend([(0, at, 1)])[0], whole[at]), at
        assert torch.equal(attend([*beside, (0, at, 1)])[-1], whole[at]), at
        drafts = min(5, length - at)
        assert torch.equal(attend([(0, at, drafts), *beside[:30]])[:drafts], whole[at : at + drafts]), at


def made_up(blocks: int, kv_heads: int, dim: int, kept: str) -> torch.Tensor:
    """A cache of random keys or values."""
    numbers = torch.randn(blocks * 16, kv_heads, dim, device="cuda").bfloat16()
    if kept != "fp8":
        return numbers.view(blocks, 16, kv_heads, dim)
    data = torch.zeros(blocks, fp8.block_bytes(16, kv_heads, dim), dtype=torch.uint8, device="cuda")
    cache = fp8.blocks_in(data, 16, kv_heads, dim)
    fp8.store(numbers, cache, torch.arange(blocks * 16, device="cuda"))
    return cache


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("more", [{}, {"quantization": "fp8", "kv_dtype": "fp8"}])
def test_tokens_alone_in_a_crowd_in_chunks_and_preempted(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    saved(name, tmp_path)
    source = random.Random(3)
    prompts = [[source.randrange(SIZES["vocab_size"]) for _ in range(source.randint(1, 300))] for _ in range(64)]
    options = {"dtype": "bfloat16", "batch_invariant": True, "prefix_caching": False, **more}
    with opened(tmp_path, **options) as built:
        together = ask(built, prompts, greedy(64)).of(64)
        for at in range(0, 64, 8):
            assert ask(built, [prompts[at]], greedy(64)).of(1) == [together[at]]
    for other in ({"chunk_tokens": 64}, {"max_num_seqs": 3}, {"kv_memory": 70 * 16 * 512, "watermark": 0.0}):
        with opened(tmp_path, **options, **other) as built:
            found = ask(built, prompts, greedy(64))
            assert found.of(64) == together, other
            assert ("kv_memory" not in other) or found.preemptions
