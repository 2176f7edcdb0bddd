"""The C library: that it is found or its absence explained, and that other rows, threads and pieces change no bit."""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from shoal import kernels
from shoal.errors import ShoalError
from shoal.kernels import Batch
from shoal.kernels.cpu import CpuOps, Library, NativeOps, NoLibrary, compiled, find, make, plain, structs
from shoal.kernels.ref import RefOps
from shoal.kernels.weights import DenseWeight, Int8Weight, TiledWeight, Weight, can_be_tiled, quantize
from shoal.models.layer import Layer, run_layers
from tests.effort import covering
from tests.kernels.layers import a_layer, in_8_bits, in_one_call, prepared, with_weights
from tests.kernels.pretended import older, pretended
from tests.kernels.ragged import Tables

REF = RefOps()
NATIVE = [
    pytest.param(ops, id=name)
    for name, ops in [*kernels.available(), *pretended(), *older()]
    if isinstance(ops, NativeOps)
]
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def threads() -> object:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("ops", NATIVE)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [172, 576])
def test_a_row_does_not_depend_on_the_other_rows(ops: NativeOps, dtype: torch.dtype, inputs: int) -> None:
    """To the last bit: in every tile size, and across the border between few and many rows."""
    x, values, bias = torch.randn(300, inputs), torch.randn(50, inputs).to(dtype), torch.randn(50).to(dtype)
    weight, small = DenseWeight(values), quantize(values)
    whole, whole8 = ops.linear(x, weight, bias), ops.linear(x, small, bias)
    for first, end in ((0, 1), (3, 5), (7, 10), (20, 24), (30, 35), (2, 33), (11, 80), (70, 140), (100, 299)):
        assert torch.equal(ops.linear(x[first:end], weight, bias), whole[first:end])
        assert torch.equal(ops.linear(x[first:end], small, bias), whole8[first:end])


TILED = [pytest.param(param.values[0], id=param.id) for param in NATIVE if param.values[0].calls.shoal_has_tiles()]
READ_TILES = [param for param in NATIVE if param.values[0].calls.shoal_reads_tiles(TYPES.index(torch.bfloat16))]


def tiled(ops: NativeOps, values: torch.Tensor) -> TiledWeight:
    """A copy of it, in tiles."""
    found = ops.prepare(DenseWeight(values.clone()))
    assert isinstance(found, TiledWeight)
    return found


def tiled8(ops: NativeOps, weight: Int8Weight) -> Int8Weight:
    found = ops.prepare(replace(weight, stored=DenseWeight(weight.stored.values.clone())))
    assert isinstance(found, Int8Weight)
    assert isinstance(found.stored, TiledWeight)
    return found


@pytest.mark.parametrize("ops", TILED)
@pytest.mark.parametrize(
    ("inputs", "outputs", "biased"),
    covering([(64, 16), (576, 48), (160, 208), (1536, 80)], [False, True], ways=1),
)
def test_tiled_weights_give_the_same_bits(ops: NativeOps, inputs: int, outputs: int, biased: bool) -> None:
    """For every number of rows, with and without a bias and a residual; the matrix can be had back."""
    values = torch.randn(outputs, inputs).bfloat16()
    bias = torch.randn(outputs).bfloat16() if biased else None
    weight, small, tiles = DenseWeight(values), quantize(values), tiled(ops, values)
    small_tiles = tiled8(ops, small)
    assert not torch.equal(tiles.values, values), "nothing was tiled"
    assert torch.equal(tiles.dense(), values)
    assert torch.equal(small_tiles.dense(), small.dense())
    assert (tiles.shape, tiles.dtype, tiles.nbytes) == (weight.shape, weight.dtype, weight.nbytes)
    assert (small_tiles.shape, small_tiles.nbytes) == (small.shape, small.nbytes)
    for rows in (1, 2, 7, 15, 16, 17, 29, 31, 32, 33, 48, 70, 150, 300):
        x, residual = torch.randn(rows, inputs), torch.randn(rows, outputs)
        assert torch.equal(ops.linear(x, tiles, bias), ops.linear(x, weight, bias)), rows
        assert torch.equal(ops.linear(x, small_tiles, bias), ops.linear(x, small, bias)), rows
        added = ops.linear_add(x, tiles, bias, residual.clone())
        assert torch.equal(added, ops.linear_add(x, weight, bias, residual.clone())), rows


@pytest.mark.parametrize("ops", READ_TILES)
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_tiled_weights(ops: NativeOps, dtype: torch.dtype) -> None:
    weight, ids = torch.randn(96, 128).to(dtype), torch.tensor([0, 95, 17, 16, 15, 17])
    small = quantize(weight)
    tiles, small_tiles = tiled(ops, weight), tiled8(ops, small)
    for found in (ops.embed(ids, tiles), CpuOps().embed(ids, tiles).float(), REF.embed(ids, tiles).float()):
        assert torch.equal(found, weight[ids].float())
    for found in (ops.embed(ids, small_tiles), REF.embed(ids, small_tiles)):
        assert torch.equal(found, small.rows(ids))
    many = torch.randint(96, (3000,))  # enough for all threads
    assert torch.equal(ops.embed(many, tiles), weight[many].float())


@pytest.mark.parametrize("ops", READ_TILES)
@pytest.mark.parametrize("dtype", TYPES)
def test_plain_torch_multiplies_by_tiled_weights_too(ops: NativeOps, dtype: torch.dtype) -> None:
    weight, x = torch.randn(32, 64).to(dtype), torch.randn(3, 64).to(dtype)
    for plain_ops in (CpuOps(), REF):
        wanted = plain_ops.linear(x, DenseWeight(weight), None)
        assert torch.equal(plain_ops.linear(x, tiled(ops, weight), None), wanted)


@pytest.mark.parametrize("ops", NATIVE)
def test_only_whole_tiles_are_tiled(ops: NativeOps) -> None:
    """Matrices of partial tiles and other types stay as they are, and so does everything without tiles."""
    kept = {
        "rows": torch.randn(17, 64).bfloat16(),
        "columns": torch.randn(16, 40).bfloat16(),
        "wide columns": torch.randn(16, 40),
        "half": torch.randn(16, 64).half(),
    }
    for values in kept.values():
        found = ops.prepare(DenseWeight(values))
        assert isinstance(found, DenseWeight)
        assert torch.equal(found.values, values)
    transposed = torch.randn(64, 16).bfloat16().T
    assert torch.equal(ops.prepare(DenseWeight(transposed)).dense(), transposed)
    for dtype in TYPES:
        whole = torch.randn(16, 64).to(dtype)
        reads_tiles = bool(ops.calls.shoal_reads_tiles(ops.types[dtype]))
        found = ops.prepare(DenseWeight(whole.clone()))
        assert isinstance(found, TiledWeight if reads_tiles else DenseWeight)
        assert torch.equal(found.values, whole) is not reads_tiles
        assert torch.equal(ops.prepare(found).values, found.values), "tiled twice"
    assert not any(map(can_be_tiled, (kept["rows"], kept["columns"], transposed)))


def attend(ops: NativeOps, batch: Batch, q: torch.Tensor, cache: torch.Tensor, window: int) -> torch.Tensor:
    return ops.attention(q, cache[0], cache[1], batch, 0.125, window)


@pytest.mark.parametrize(("ops", "dtype", "window"), covering(NATIVE, TYPES, [0, 100, 700]))
def test_attention_does_not_depend_on_other_sequences_or_chunks(
    ops: NativeOps, dtype: torch.dtype, window: int
) -> None:
    """Alone or with others, in one chunk or token by token; contexts that end around the borders of pieces."""
    lengths = [1, 63, 64, 65, 511, 512, 513, 1100]
    tables = Tables(lengths, 16)
    cache = torch.randn(2, tables.blocks, 16, 2, 64).to(dtype)
    pieces = [(row, max(0, length - 70), min(70, length)) for row, length in enumerate(lengths)]
    together = tables.batch(pieces)
    q = torch.randn(together.starts[-1], 6, 64).to(dtype).float()
    whole = attend(ops, together, q, cache, window)
    wanted = REF.attention(q, cache[0].float(), cache[1].float(), together, 0.125, window)
    # tiles round the shares too, by 1/512 at most: of values of about 1, which the shares average
    tolerance = 1e-2 if dtype == torch.bfloat16 and ops.library.bfloat16_products == "tiles" else 2e-5
    torch.testing.assert_close(whole, wanted, atol=tolerance, rtol=tolerance)
    for place, (row, before, new) in enumerate(pieces):
        first = together.starts[place]
        for skipped in {0, new // 3, new - 1}:
            for count in {1, new - skipped}:
                alone = tables.batch([(row, before + skipped, count)])
                rows = slice(first + skipped, first + skipped + count)
                assert torch.equal(attend(ops, alone, q[rows], cache, window), whole[rows]), (row, skipped, count)


@pytest.mark.parametrize(
    ("ops", "dtype", "heads", "kv_heads", "dim", "block_size", "window"),
    covering(
        NATIVE,
        TYPES,
        [(9, 3, 64), (16, 8, 128), (22, 11, 64), (20, 1, 64), (36, 2, 32)],
        [(16, 0), (5, 0), (16, 90)],
    ),
)
def test_many_decodes_equal_single_ones(
    ops: NativeOps, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int, window: int
) -> None:
    """KV heads are worked on together where there are sequences enough for all threads, and one by one elsewhere."""
    lengths = [1, 15, 64, 65, 200, 513, 40, 128, 31, 700]
    tables = Tables(lengths, block_size)
    cache = torch.randn(2, tables.blocks, block_size, kv_heads, dim).to(dtype)
    pieces = [(row, length - 1, 1) for row, length in enumerate(lengths)]
    together = tables.batch(pieces)
    q = torch.randn(len(lengths), heads, dim).to(dtype).float()
    whole = attend(ops, together, q, cache, window)
    wanted = REF.attention(q, cache[0].float(), cache[1].float(), together, 0.125, window)
    tolerance = 2e-2 if dtype == torch.bfloat16 and ops.library.bfloat16_products == "tiles" else 2e-5
    torch.testing.assert_close(whole, wanted, atol=tolerance, rtol=tolerance)
    for place, piece in enumerate(pieces):
        assert torch.equal(attend(ops, tables.batch([piece]), q[place : place + 1], cache, window)[0], whole[place])


@pytest.mark.parametrize(
    ("ops", "dtype", "window", "kv_heads", "group", "dim"),
    covering(
        NATIVE,
        [*TYPES, torch.float16],
        [0, 90],
        [(3, 3, 64), (8, 2, 128), (8, 1, 64), (2, 5, 48), (5, 4, 16)],
    ),
)
def test_a_decode_is_the_same_among_many_alone_and_in_a_prompt(
    ops: NativeOps, dtype: torch.dtype, window: int, kv_heads: int, group: int, dim: int
) -> None:
    """Many single queries take several KV heads in a block, one alone takes one; a stretch has many rows."""
    if dtype not in ops.types or dim % ops.lanes:
        pytest.skip("torch computes it")
    lengths = [1, 2, 5, 9, 60, 63, 64, 65, 66, 100, 127, 128, 129, 130, 200, 511, 512, 513, 600, 1040]
    tables = Tables(lengths, 16)
    cache = torch.randn(2, tables.blocks, 16, kv_heads, dim).to(dtype)
    stretch = tables.batch([(row, max(0, length - 9), min(9, length)) for row, length in enumerate(lengths)])
    q = torch.randn(stretch.starts[-1], kv_heads * group, dim).to(dtype).float()
    ends = [start - 1 for start in stretch.starts[1:]]
    whole = attend(ops, stretch, q, cache, window)[ends]
    wanted = REF.attention(q, cache[0].float(), cache[1].float(), stretch, 0.125, window)[ends]
    tolerance = 3e-2 if dtype == torch.bfloat16 and ops.library.bfloat16_products == "tiles" else 2e-5
    torch.testing.assert_close(whole, wanted, atol=tolerance, rtol=tolerance)
    decodes = tables.batch([(row, length - 1, 1) for row, length in enumerate(lengths)])
    assert torch.equal(attend(ops, decodes, q[ends], cache, window), whole)
    for row, length in enumerate(lengths):
        alone = attend(ops, tables.batch([(row, length - 1, 1)]), q[ends[row] : ends[row] + 1], cache, window)
        assert torch.equal(alone, whole[row : row + 1]), length


@pytest.mark.parametrize("ops", NATIVE)
def test_threads_change_no_bit(ops: NativeOps, threads: object) -> None:
    tables = Tables([1300, 40, 700], 16)
    batch = tables.batch([(0, 1299, 1), (1, 0, 40), (2, 699, 1)])
    cache, q = torch.randn(2, tables.blocks, 16, 3, 64), torch.randn(42, 9, 64)
    x, values = torch.randn(150, 576), torch.randn(200, 576)
    weight, narrow, small = DenseWeight(values), DenseWeight(values.bfloat16()), quantize(values)
    narrow_cache = cache.bfloat16()
    found = []
    for count in (1, 2, 3):
        threads(count)  # type: ignore[operator]
        normed = ops.rms_norm(x, torch.ones(576), 1e-5)
        products = [ops.linear(rows, those, None) for rows in (x, x[:33], x[:1]) for those in (weight, narrow, small)]
        attended = [attend(ops, batch, q, those, 0) for those in (cache, narrow_cache)]
        found.append((*products, *attended, normed, ops.silu_mul(x)))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("ops", NATIVE)
@pytest.mark.parametrize("dim", [8, 16, 80, 96, 256])
def test_every_head_size(ops: NativeOps, dim: int) -> None:
    tables = Tables([130, 20], 16)
    batch = tables.batch([(0, 129, 1), (1, 0, 20)])
    cache, q = torch.randn(2, tables.blocks, 16, 2, dim), torch.randn(21, 8, dim)
    wanted = REF.attention(q, cache[0], cache[1], batch, 0.125, 0)
    torch.testing.assert_close(attend(ops, batch, q, cache, 0), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("ops", NATIVE)
def test_many_heads_of_one_group(ops: NativeOps) -> None:
    """More than a block of rows holds."""
    tables = Tables([90, 5], 16)
    batch = tables.batch([(0, 80, 10), (1, 4, 1)])
    cache, q = torch.randn(2, tables.blocks, 16, 1, 32), torch.randn(11, 71, 32)
    wanted = REF.attention(q, cache[0], cache[1], batch, 0.2, 0)
    torch.testing.assert_close(ops.attention(q, cache[0], cache[1], batch, 0.2, 0), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("ops", NATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_are_float32(ops: NativeOps, dtype: torch.dtype) -> None:
    weight, ids = torch.randn(20, 33).to(dtype), torch.tensor([3, 0, 19, 3])
    assert torch.equal(ops.embed(ids, DenseWeight(weight)), weight[ids].float())
    small = quantize(weight)
    assert torch.equal(ops.embed(ids, small), small.dense()[ids])


@pytest.mark.parametrize("ops", NATIVE)
def test_extreme_values(ops: NativeOps) -> None:
    """Nothing overflows on the way, and NaN stays NaN."""
    torch.manual_seed(0)  # of scores that nearly tie, rounding would decide which one wins
    gate = torch.tensor([1e30, -1e30, 100.0, -100.0, 0.0, float("nan")]).repeat(6)  # whole vectors, and a rest
    found = ops.silu_mul(torch.cat((gate, torch.ones(36)))[None]).view(6, 6)
    wanted = torch.tensor([1e30, 0.0, 100.0, 0.0, 0.0]).expand(6, 5)
    torch.testing.assert_close(found[:, :5], wanted, atol=1e-5, rtol=1e-5)
    assert found[:, 5].isnan().all()
    tables = Tables([70], 16)
    batch = tables.batch([(0, 69, 1)])
    cache, q = torch.randn(2, tables.blocks, 16, 1, 64), torch.full((1, 1, 64), 1e4)
    wanted = REF.attention(q, cache[0], cache[1], batch, 1.0, 0)
    torch.testing.assert_close(ops.attention(q, cache[0], cache[1], batch, 1.0, 0), wanted, atol=1e-4, rtol=1e-4)
    q[0, 0, 0] = float("nan")
    assert ops.attention(q, cache[0], cache[1], batch, 1.0, 0).isnan().all()
    x = torch.ones(2, 64)
    x[1, 3] = float("nan")
    weights: tuple[Weight, ...] = (DenseWeight(torch.randn(9, 64)), quantize(torch.randn(9, 64)))
    for weight in weights:
        out = ops.linear(x, weight, None)
        assert out[0].isfinite().all()
        assert out[1].isnan().all()


@pytest.mark.parametrize("ops", [*NATIVE, pytest.param(CpuOps(), id="cpu"), pytest.param(REF, id="ref")])
def test_int8_weights_with_a_16_bit_bias(ops: kernels.Ops) -> None:
    """As in a quantized model with biases: activations are float32, biases keep the model's type."""
    x, small, bias = torch.randn(3, 64), quantize(torch.randn(9, 64)), torch.randn(9).bfloat16()
    wanted = x @ small.dense().T + bias.float()
    torch.testing.assert_close(ops.linear(x, small, bias), wanted, atol=0.5, rtol=0.1)


def test_int8_weights_are_near() -> None:
    weight = torch.randn(40, 100) * torch.rand(40, 1) * 3
    weight[7] = 0
    small = quantize(weight)
    assert small.stored.shape == (40, 128)
    assert small.shape == (40, 100)
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert ((small.dense() - weight).abs() <= steps * 0.501).all()
    assert torch.equal(small.rows(torch.tensor([3, 7])), small.dense()[[3, 7]])


@pytest.mark.parametrize("ops", NATIVE)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 9, 70])
def test_int8_products(ops: NativeOps, rows: int) -> None:
    """Against the same weights in full; the inputs are rounded too, to 1/254 of each row's largest."""
    x, small, bias = torch.randn(rows, 300), quantize(torch.randn(51, 300)), torch.randn(51)
    residual = torch.randn(rows, 51)
    wanted = REF.linear_add(x, small, bias, residual)
    found = ops.linear_add(x, small, bias, residual.clone())
    step = x.abs().amax(1, keepdim=True) / 127
    assert ((found - wanted).abs() <= step * small.dense().abs().sum(1) / 2).all()
    assert (found - wanted).abs().mean() < 0.2


def test_without_a_compiler_plain_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    found = find()
    assert isinstance(found, NoLibrary)
    assert "no C compiler" in str(found)
    assert type(make()) is CpuOps


def test_a_compiler_that_fails_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && echo bad 1.0 && exit\necho it is broken >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = find("portable")
    assert isinstance(found, NoLibrary)
    assert "it is broken" in found.reason
    assert "using plain torch" in caplog.text
    assert not list((tmp_path / "cache" / "shoal").iterdir())


def test_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(find("off")) == "plain torch: switched off"
    monkeypatch.setenv("SHOAL_CPU_KERNELS", "off")
    assert type(make()) is CpuOps
    assert isinstance(make("portable"), NativeOps)  # asked for by name, whatever the environment has
    other = "avx2" if compiled.is_arm() else "neon"
    assert "this CPU has no" in str(find(other))
    with pytest.raises(ShoalError, match="avx1024"):
        find("avx1024")


def test_flags_follow_the_cpu() -> None:
    assert compiled.usable_levels(frozenset({"asimd"})) == ["neon", "portable"]
    assert compiled.usable_levels(frozenset({"avx2", "fma", "f16c", "sse2"})) == ["avx2", "portable"]
    assert compiled.usable_levels(frozenset()) == ["portable"]
    tiles = frozenset(compiled.NEEDS["amx"])
    assert compiled.usable_levels(tiles) == ["amx", "avx512", "avx2", "portable"]
    assert {"-mamx-tile", "-mamx-bf16", "-mamx-int8", "-mavx512bf16"} <= set(compiled.flags_for("amx", tiles))
    assert "-mavxvnni" in compiled.flags_for("avx2", tiles | {"avx_vnni"})
    everything = frozenset({*compiled.NEEDS["avx512"], "avx512_bf16"})
    assert compiled.usable_levels(everything)[0] == "avx512"
    assert "-mavx512bf16" in compiled.flags_for("avx512", everything)
    assert "-mavx512bf16" not in compiled.flags_for("avx512", everything | {compiled.INTEL})
    assert "-mavx512bf16" in compiled.flags_for("amx", tiles | {compiled.INTEL})
    assert compiled.flags_for("neon", frozenset({"asimd", "asimddp"})) == ("-march=armv8.2-a+dotprod",)
    assert compiled.flags_for("neon", frozenset({"asimd"})) == ("-march=armv8-a",)
    assert compiled.flags_for("portable", everything) == ()


def test_without_permission_for_tiles_the_next_level_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is reported."""
    real = find("portable")
    if not isinstance(real, Library):
        pytest.skip("no compiler here")
    refused = NoLibrary("the system does not grant the AMX registers: Operation not permitted")
    monkeypatch.setattr(compiled, "cpu_features", lambda: frozenset(compiled.NEEDS["amx"]))
    monkeypatch.setattr(compiled, "_load", lambda level, _: refused if level == "amx" else replace(real, level=level))
    monkeypatch.delenv("SHOAL_CPU_KERNELS", raising=False)
    for level in ("auto", "amx"):
        found = find(level)
        assert isinstance(found, Library)
        assert found.level == "avx512"
        assert "no amx: the system does not grant the AMX registers" in str(found)
    assert str(find("avx2")) == "C kernels, avx2"


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 20, 7), (5, 172, 50), (17, 64, 16), (33, 90, 33), (150, 96, 40)]
)
def test_products_of_bfloat16(rows: int, inputs: int, outputs: int) -> None:
    """Exactly those of inputs rounded to bfloat16, but for the rounding of sums; at sizes that fill no tile."""
    x, residual = torch.randn(rows, inputs), torch.randn(rows, outputs)
    weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16()
    wanted = x.bfloat16().double() @ weight.double().T + bias.double() + residual.double()
    for name, ops in pretended():
        found = ops.linear_add(x, DenseWeight(weight), bias, residual.clone())
        torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("features", "multiplies", "wanted"),
    [
        ({"avx2", "avx512_bf16"}, True, True),
        ({"avx2", "amx_bf16"}, True, True),
        ({"asimd", "bf16"}, True, True),
        ({"avx2", "fma"}, True, False),  # torch would compute it, but no faster than float32
        ({"avx2", "avx512_bf16"}, False, False),
    ],
)
def test_bfloat16_is_the_default_where_it_is_fast(
    monkeypatch: pytest.MonkeyPatch, features: set[str], multiplies: bool, wanted: bool
) -> None:
    monkeypatch.setattr(plain, "cpu_features", lambda: frozenset(features))
    monkeypatch.setattr(plain, "computes_natively", lambda dtype: multiplies)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    assert plain.has_bfloat16_products.__wrapped__() is wanted


def test_the_library_reports_how_it_multiplies_bfloat16() -> None:
    assert [ops.library.bfloat16_products for _, ops in pretended()] == ["tiles", "dot products"]


def test_the_library_is_compiled_once_and_then_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a compiler that counts its calls."""
    real = compiled._compiler()
    if real is None:
        pytest.skip("no compiler here")
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/calls\nexec {real} -O0 "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = compiled.flags_for("portable", frozenset())
    first = compiled._compiled(str(compiler), flags)
    assert first.parent == tmp_path / "cache" / "shoal"
    assert first.parent.stat().st_mode & 0o077 == 0
    assert compiled._compiled(str(compiler), flags) == first
    assert (tmp_path / "calls").read_text().splitlines().count("-O3") == 1
    assert list(first.parent.iterdir()) == [first]


def test_a_cache_that_others_can_write_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code is loaded from it."""
    (tmp_path / "shoal").mkdir()
    (tmp_path / "shoal").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compiled.cache_folder()
    assert folder != tmp_path / "shoal"
    assert folder.stat().st_mode & 0o077 == 0
    assert os.access(folder, os.W_OK)


def test_without_a_home_the_spare_folder_is_used_if_it_is_ours_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    monkeypatch.setattr(compiled, "_spare", None)
    compiled.keep_in(tmp_path / "kernels")
    assert compiled.cache_folder() == compiled.cache_folder() == tmp_path / "kernels"
    assert (tmp_path / "kernels").stat().st_mode & 0o077 == 0
    (tmp_path / "kernels").chmod(0o770)
    assert compiled.cache_folder() != tmp_path / "kernels"
    compiled.keep_in(tmp_path / "gone" / "kernels")
    assert not compiled.cache_folder().is_relative_to(tmp_path), "a folder that went away is not made again by guess"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert compiled.cache_folder() == tmp_path / "cache" / "shoal"


def test_denormals_survive_loading() -> None:
    """A library linked with -ffast-math would flush them for the whole process."""
    code = (
        "import torch; from shoal.kernels.cpu import find; print(find());"
        "assert float(torch.tensor(1e-30) * torch.tensor(1e-10)) > 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ})


def test_every_included_file_is_part_of_the_cached_files_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A change of any C file compiles a new library."""
    folder = compiled.SOURCE.parent
    texts = {path.name: path.read_text() for path in folder.glob("*.c")}
    included = {name for text in texts.values() for name in re.findall(r'#include "(.*)"', text)}
    assert included == texts.keys() - {"native.c"}, "a file is included nowhere, or is not beside native.c"
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(compiled, "SOURCE", tmp_path / "native.c")
    monkeypatch.setattr(compiled, "_run", lambda command: "gcc 13")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler = compiled._compiler()
    if compiler is None:
        pytest.skip("no compiler here")
    names = {compiled._compiled(compiler, ())}
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{text}/* changed */")
        names.add(compiled._compiled(compiler, ()))
        (tmp_path / name).write_text(text)
    assert len(names) == 1 + len(texts)


@pytest.mark.parametrize("ops", NATIVE)
def test_both_sides_agree_on_the_structs(ops: NativeOps) -> None:
    assert structs.size_mismatch(ops.calls) is None


@pytest.mark.parametrize("changed", ["grown", "missing", "unknown"])
def test_a_library_with_other_structs_is_not_used(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(find(), Library):
        pytest.skip("no library here")

    class Grown(structs.PassStruct):  # type: ignore[misc]
        _fields_ = (("more", ctypes.c_long),)

    mirrors = {
        "grown": tuple(Grown if one is structs.PassStruct else one for one in structs.MIRRORED),
        "missing": structs.MIRRORED[:-1],
        "unknown": (*structs.MIRRORED, Grown),
    }
    monkeypatch.setattr(structs, "MIRRORED", mirrors[changed])
    found = compiled._load.__wrapped__("portable", compiled._compiler())
    assert isinstance(found, NoLibrary)
    assert "does not fit this version" in str(found)
    assert "bytes" in str(found)


def test_the_library_describes_itself() -> None:
    found = find()
    if isinstance(found, Library):
        assert found.level in str(found)
        assert found.lanes in (4, 8, 16)
        assert found.path.exists()


@pytest.mark.parametrize("ops", NATIVE)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("normed", "biased"), [(False, False), (True, True)])
def test_all_layers_in_one_call(ops: NativeOps, dtype: torch.dtype, normed: bool, biased: bool) -> None:
    """As one operation after the other, to the last bit; in 8 bits too; and near ref."""
    layers = [a_layer(dtype, 4, 2, 32, normed, biased) for _ in range(3)]
    small = [with_weights(one, in_8_bits) for one in layers]
    some_tiled = [with_weights(one, partial(prepared, ops), ("out", "down")) for one in layers]
    tables = Tables([40, 9], 16)
    angles = torch.randn(14, 16)
    rope = (angles.cos(), angles.sin())
    start = torch.randn(14, 48)
    for these in (layers, small, some_tiled):
        found = []
        runs = [partial(in_one_call, ops), partial(run_layers, ops)]
        compared = these is layers and dtype == torch.float32
        for run in [*runs, partial(run_layers, REF)] if compared else runs:
            torch.manual_seed(0)
            data = torch.randn(3, 2, tables.blocks, 16, 2, 32).to(dtype)
            kv = [(one[0], one[1]) for one in data]
            batch = tables.batch([(0, 30, 10), (1, 5, 4)])
            found.append((run(these, start.clone(), rope, batch, kv), data))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
        if compared:
            torch.testing.assert_close(found[0][0], found[2][0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found[0][1], found[2][1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ops", TILED)
@pytest.mark.parametrize(
    ("tokens", "inner", "biased"),
    covering([*((n, 96) for n in (1, 9, 16, 21, 32, 33, 90, 150, 300)), (40, 48)], [False, True], ways=1),
)
def test_layers_of_tiled_weights(ops: NativeOps, biased: bool, tokens: int, inner: int) -> None:
    """To the last bit as of weights that are not, and the gate as one operation after the other; in 8 bits too."""
    layers = [a_layer(torch.bfloat16, 4, 2, 32, False, biased, hidden=64, inner=inner) for _ in range(2)]
    small = [with_weights(one, in_8_bits) for one in layers]
    in_tiles = [with_weights(one, partial(prepared, ops)) for one in layers]
    assert isinstance(in_tiles[0].mlp.gate_up.weight, TiledWeight)
    assert isinstance(in_tiles[0].mlp.out.weight, TiledWeight) == (inner % 32 == 0)
    small_tiles = [with_weights(one, partial(prepared, ops)) for one in small]
    assert isinstance(small_tiles[0].mlp.out.weight, Int8Weight)
    assert isinstance(small_tiles[0].mlp.out.weight.stored, TiledWeight)
    tables = Tables([tokens + 5], 16)
    angles = torch.randn(tokens, 16)
    rope = (angles.cos(), angles.sin())
    start, data = torch.randn(tokens, 64), torch.randn(2, 2, tables.blocks, 16, 2, 32).bfloat16()

    def run(these: list[Layer], way: Callable[..., torch.Tensor]) -> torch.Tensor:
        kv = [(one[0], one[1]) for one in data.clone()]
        return way(ops, these, start.clone(), rope, tables.batch([(0, 5, tokens)]), kv)

    for plain_ones, those in ((layers, in_tiles), (small, small_tiles)):
        wanted = run(plain_ones, in_one_call)
        assert torch.equal(run(those, in_one_call), wanted)
        assert torch.equal(run(those, run_layers), wanted)


@pytest.mark.parametrize("ops", NATIVE)
def test_a_pass_that_c_cannot_compute_is_left_to_the_model(ops: NativeOps) -> None:
    """An odd head size, a padded rectangle; nothing has been changed then, and one operation after the other works."""
    for dim in (10, 32, 10):
        layers = [a_layer(torch.float32, 2, 1, dim, False, False)]
        tables = Tables([20], 16)
        angles = torch.randn(20, dim // 2)
        start, data = torch.randn(20, 48), torch.zeros(2, tables.blocks, 16, 1, dim)
        rope, batch, kv = (angles.cos(), angles.sin()), tables.batch([(0, 0, 20)]), [(data[0], data[1])]
        wanted = run_layers(REF, layers, start.clone(), rope, batch, kv)
        fused = ops.fused(layers)
        assert fused is not None
        data.zero_()
        before = start.clone()
        assert fused(start, rope, replace(batch, width=20), kv) is None
        found = fused(start, rope, batch, kv)
        assert (found is None) == (dim % ops.lanes != 0)
        if found is None:
            assert torch.equal(start, before)
            assert not data.any()
            found = run_layers(ops, layers, start, rope, batch, kv)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ops", NATIVE)
def test_another_cache_after_the_first(ops: NativeOps) -> None:
    layers = [a_layer(torch.float32, 2, 1, 32, False, False)]
    fused = ops.fused(layers)
    assert fused is not None
    tables = Tables([20], 16)
    angles, start = torch.randn(20, 16), torch.randn(20, 48)
    rope, batch = (angles.cos(), angles.sin()), tables.batch([(0, 0, 20)])
    caches = [torch.zeros(2, tables.blocks, 16, 1, 32) for _ in range(2)]
    found = [fused(start.clone(), rope, batch, [(data[0], data[1])]) for data in caches]
    assert torch.equal(found[0], found[1])  # type: ignore[arg-type]
    assert torch.equal(caches[0], caches[1])
    assert caches[1].any()


@pytest.mark.parametrize("ops", NATIVE)
def test_layers_of_an_unknown_kind_are_not_fused(ops: NativeOps) -> None:
    layer = a_layer(torch.float32, 2, 1, 32, False, False)
    other = replace(layer, mlp=replace(layer.mlp, kind="experts"))
    assert ops.fused([layer, other]) is None
    assert ops.fused([replace(layer, attention=replace(layer.attention, kind="latent"))]) is None
    assert all(plain_ops.fused([layer]) is None for plain_ops in (CpuOps(), REF))
