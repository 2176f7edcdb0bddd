"""What this machine is and how Shoal uses it: device, instruction sets, kernels and why, threads, measured rates.

Measures for some seconds; changes nothing. Knows kernels and torch, no model and no engine.
"""

import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.bench.cpu_noise import NoiseWatch, noise_figures, noise_in, under_banner
from shoal.bench.floor import measure
from shoal.kernels import pick
from shoal.kernels.cpu import Library, find, has_bfloat16_products
from shoal.kernels.cpu.compiled import EXTRAS, NEEDS, cpu_features
from shoal.kernels.weights import DenseWeight, quantize
from shoal.machine.cgroup import cpu_quota, memory_limit
from shoal.machine.cpus import allowed_cpus, choose_cpus
from shoal.machine.memory import available_bytes
from shoal.machine.names import cpu_name

REPORTED = {name for needed in NEEDS.values() for name in needed} | {
    *(name for extras in EXTRAS.values() for name in extras),
    *("avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8", "bf16", "i8mm", "sve", "sve2"),
}
OUTPUTS, INPUTS = 65536, 576  # the lm_head of a small model: 151 MB, more than any cache holds


def examine(level: str = "auto", threads: int | None = None) -> dict[str, Any]:
    """The whole report as data."""
    if threads:
        torch.set_num_threads(threads)
    usable = torch.cuda.is_available()
    found = find(level)
    allowed, limit = allowed_cpus(), memory_limit()
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": gpu_name() if usable else "cpu",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "allowed_cpus": allowed,
        "used_cpus": None if allowed is None else list(choose_cpus(allowed).cpus),
        "cpu_quota": cpu_quota(),
        "memory_limit_bytes": limit.limit_bytes if limit else None,
        "memory_available_bytes": available_bytes(),
        "threads": torch.get_num_threads(),
        "openmp_libraries": openmp_libraries(),
        "instructions": sorted(cpu_features() & REPORTED),
        "kernels": str(found),
        "default_type": "bfloat16" if has_bfloat16_products() else "float32",
    }
    if isinstance(found, Library):
        report |= {"compiler": found.compiler, "flags": list(found.flags), "library": str(found.path)}
    whole, watch = NoiseWatch(), NoiseWatch()
    machine = measure(torch.float32, "cpu", OUTPUTS * INPUTS * 4)
    report |= {"bandwidth_gb_s": machine.bandwidth_gb_s, "matrix_gflop_s": machine.matrix_gflop_s}
    report["machine_noise"] = noise_figures(watch.noise())
    report["linear"] = [linear_rates(level, name) for name in ("float32", "bfloat16", "int8")]
    return {**report, **noise_figures(whole.noise())}


def linear_rates(level: str, name: str) -> dict[str, Any]:
    """A linear layer of one row and of many rows, with the kernels that would be used."""
    ops = pick("cpu", level)
    full = torch.randn(OUTPUTS, INPUTS)
    weight = ops.prepare(quantize(full) if name == "int8" else DenseWeight(full.to(getattr(torch, name))))
    size = OUTPUTS * INPUTS * {"float32": 4, "bfloat16": 2, "int8": 1}[name]
    activations = ops.embed(torch.zeros(1, dtype=torch.int64), weight).dtype  # as a model's would be
    one, many = torch.randn(1, INPUTS).to(activations), torch.randn(32, INPUTS).to(activations)
    watch = NoiseWatch()
    with torch.inference_mode():
        one_s, many_s = best_s(lambda: ops.linear(one, weight, None)), best_s(lambda: ops.linear(many, weight, None))
    return {
        "type": name,
        "one_row_gb_s": size / one_s / 1e9,
        "many_rows_gflop_s": 2 * len(many) * OUTPUTS * INPUTS / many_s / 1e9,
        **noise_figures(watch.noise()),
    }


def best_s(work: Callable[[], object], runs: int = 3) -> float:
    found = []
    for _ in range(runs + 1):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return min(found[1:])


def gpu_name() -> str:
    return str(torch.cuda.get_device_name())


def openmp_libraries() -> list[str]:
    """Those in this process; two would compete for the same cores."""
    if not sys.platform.startswith("linux"):
        return []
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    return sorted(path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp")))


def report_table(report: dict[str, Any]) -> str:
    """The report as a table."""
    openmp = report["openmp_libraries"]
    rows = [
        ("python, torch", f"{report['python']}, {report['torch']}"),
        ("device", report["device"]),
        ("CPU", f"{report['cpu']}, {report['cores']} logical CPUs, {report['threads']} threads used"),
        *limits_in_words(report),
        ("instructions", " ".join(report["instructions"]) or "none of note"),
        ("kernels", report["kernels"]),
    ]
    if "library" in report:
        rows.append(("compiled with", f"{report['compiler']} {' '.join(report['flags'])}"))
        rows.append(("kept in", report["library"]))
    if len(openmp) > 1:
        rows.append(("OpenMP", f"{len(openmp)} libraries in one process, which slow each other: {', '.join(openmp)}"))
    beside = remark(report["machine_noise"])
    rows += [
        ("weights", f"{report['default_type']} by default for models of 16 bits"),
        ("memory", f"{report['bandwidth_gb_s']:.1f} GB/s read{beside}"),
        ("matrices", f"{report['matrix_gflop_s']:,.0f} GFLOP/s in float32 (torch){beside}"),
    ]
    rows += [
        (
            f"linear, {one['type']}",
            f"{one['one_row_gb_s']:.1f} GB/s for one row, {one['many_rows_gflop_s']:,.0f} GFLOP/s for 32{remark(one)}",
        )
        for one in report["linear"]
    ]
    wide = max(len(name) for name, _ in rows)
    return under_banner("\n".join(f"{name:<{wide}}  {value}" for name, value in rows), [noise_in(report)])


def limits_in_words(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What keeps us from using the whole machine, if anything does."""
    parts, rows = [], []
    allowed, used = report["allowed_cpus"], report["used_cpus"]
    if allowed and len(allowed) < (report["cores"] or 0):
        parts.append(f"we may run on {len(allowed)} of them")
    if report["cpu_quota"] is not None:
        parts.append(f"a quota of {report['cpu_quota']:g} CPUs")
    if allowed and len(used) < len(allowed):
        parts.append(f"{len(allowed) - len(used)} are left alone (efficiency cores, or another socket)")
    if parts:
        rows.append(("CPU limits", ", ".join(parts)))
    if report["memory_limit_bytes"] is not None:
        free, limit = report["memory_available_bytes"] / 2**30, report["memory_limit_bytes"] / 2**30
        rows.append(("memory limit", f"{limit:.1f} GiB (control group), {free:.1f} GiB available"))
    return rows


def remark(figures: dict[str, Any]) -> str:
    noise = noise_in(figures)
    return f" ({noise.remark()})" if noise and noise.remark() else ""
