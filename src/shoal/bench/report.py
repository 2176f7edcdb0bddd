"""Figures as tables. Knows how results are shown, not how they were taken."""

from dataclasses import asdict
from typing import Any

from shoal.bench.floor import Floor, Machine
from shoal.bench.throughput import Throughput


def throughput_figures(run: Throughput, least: Floor, machine: Machine, model: str, dtype: str) -> dict[str, Any]:
    """Everything one throughput run has to say, for machines."""
    return {
        "model": model,
        "dtype": dtype,
        **asdict(run),
        "output_tok_s": run.output_tok_s,
        "total_tok_s": run.total_tok_s,
        "machine": asdict(machine),
        "floor": least.as_dict(),
        "fraction_of_floor": least.total_s / run.seconds,
    }


def throughput_table(figures: dict[str, Any]) -> str:
    """… and for people."""
    least, machine = figures["floor"], figures["machine"]
    rows = [
        ("model", f"{figures['model']} in {figures['dtype']}"),
        ("requests", f"{figures['requests']:,}"),
        ("tokens", f"{figures['prompt_tokens']:,} in, {figures['output_tokens']:,} out"),
        ("seconds", f"{figures['seconds']:.2f}"),
        ("output tok/s", f"{figures['output_tok_s']:,.1f}"),
        ("total tok/s", f"{figures['total_tok_s']:,.1f}"),
        ("passes", f"{figures['passes']:,}, on average {figures['mean_batch']:.1f} requests in each"),
        ("KV use at most", f"{figures['peak_kv_share']:.1%}"),
        ("preemptions", f"{figures['preemptions']:,} ({figures['recomputed_tokens']:,} tokens computed again)"),
        ("this machine", f"{machine['bandwidth_gb_s']:.1f} GB/s read, {machine['matrix_gflop_s']:,.0f} GFLOP/s"),
        (
            "floor",
            f"{least['total_s']:.2f} s = {least['prompt_s']:.2f} prompts + {least['weights_s']:.2f} weights "
            f"+ {least['kv_s']:.2f} KV",
        ),
        ("reached", f"{figures['fraction_of_floor']:.1%} of the floor"),
    ]
    wide = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{wide}}  {value}" for name, value in rows)
