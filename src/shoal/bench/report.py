"""Figures as tables. Knows how results are shown, not how they were measured."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shoal.bench.cpu_noise import noise_figures, noise_in, under_banner

if TYPE_CHECKING:  # they load torch, which a simulation does not need
    from shoal.bench.floor import Floor, Machine
    from shoal.bench.throughput import Throughput


def throughput_figures(run: "Throughput", least: "Floor", machine: "Machine", model: str, dtype: str) -> dict[str, Any]:
    """All figures of one throughput run, for machines."""
    return {
        "model": model,
        "dtype": dtype,
        **{name: value for name, value in asdict(run).items() if name != "noise"},
        **noise_figures(run.noise),
        "output_tok_s": run.output_tok_s,
        "total_tok_s": run.total_tok_s,
        "meaningless_text": run.meaningless,
        "machine": asdict(machine),
        "floor": least.as_dict(),
        "fraction_of_floor": least.total_s / run.seconds,
    }


def throughput_table(figures: dict[str, Any]) -> str:
    """The same as a table, for people."""
    least, machine = figures["floor"], figures["machine"]
    rows = [
        ("model", f"{figures['model']} in {figures['dtype']}"),
        ("requests", f"{figures['requests']:,}"),
        ("tokens", f"{figures['prompt_tokens']:,} in, {figures['output_tokens']:,} out"),
        ("seconds", f"{figures['seconds']:.2f}"),
        ("output tok/s", f"{figures['output_tok_s']:,.1f}"),
        ("total tok/s", f"{figures['total_tok_s']:,.1f}"),
        ("passes", f"{figures['passes']:,}, on average {figures['mean_batch']:.1f} requests in each"),
        *_draft_rows(figures),
        ("peak KV use", f"{figures['peak_kv_share']:.1%}"),
        ("preemptions", f"{figures['preemptions']:,} ({figures['recomputed_tokens']:,} tokens recomputed)"),
        ("this machine", f"{machine['bandwidth_gb_s']:.1f} GB/s read, {machine['matrix_gflop_s']:,.0f} GFLOP/s"),
        (
            "floor",
            f"{least['total_s']:.2f} s = {least['prompt_s']:.2f} prompts + {least['weights_s']:.2f} weights "
            f"+ {least['kv_s']:.2f} KV",
        ),
        ("reached", f"{figures['fraction_of_floor']:.1%} of the floor"),
    ]
    noise = noise_in(figures)
    if noise and noise.remark():
        rows.append(("noise", noise.remark()))
    wide = max(len(name) for name, _ in rows)
    return under_banner("\n".join(f"{name:<{wide}}  {value}" for name, value in rows), [noise])


def _draft_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    if figures["speculate"] == "off":
        return []
    drafted, accepted = figures["drafted_tokens"], figures["accepted_tokens"]
    shown = f"{figures['speculate']}: {drafted:,} draft tokens verified, {accepted / max(drafted, 1):.0%} accepted"
    remark = "; accepted by chance, the text means nothing" if figures["meaningless_text"] else ""
    return [("speculation", shown + remark)]


def latency_table(figures: dict[str, Any]) -> str:
    """One line per batch size; times in milliseconds, "of floor" is the floor over the measured time."""
    machine = figures["machine"]
    read = f"{machine['bandwidth_gb_s']:,.0f} GB/s, {machine['matrix_gflop_s'] / 1000:,.1f} TFLOP/s"
    head = f"{figures['model']} in {figures['dtype']}; this machine: {read}"
    if figures.get("speculate", "off") != "off":
        head += f"; speculate {figures['speculate']}"
    if figures.get("meaningless_text"):
        head += "\ndraft tokens were accepted by chance: the text means nothing"
    lines = [head, "batch  first token p50    last  of floor  gap p50     p99  of floor  tokens/pass  output tok/s"]
    lines += [
        f"{row['batch']:>5}  {1000 * row['ttft_p50_s']:>15.1f}  {1000 * row['ttft_last_s']:>6.1f}  "
        f"{row['ttft_fraction']:>8.0%}  {1000 * row['gap_p50_s']:>7.2f}  {1000 * row['gap_p99_s']:>6.2f}  "
        f"{row['gap_fraction']:>8.0%}  {row.get('row_tokens', 1.0):>11.2f}  {row['output_tok_s']:>12,.0f}{_remark(row)}"
        for row in figures["batches"]
    ]
    return under_banner("\n".join(lines), [noise_in(row) for row in figures["batches"]])


def _remark(row: dict[str, Any]) -> str:
    noise = noise_in(row)
    return f"  {noise.remark()}" if noise and noise.remark() else ""


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("output tok/s", "output_tok_s", ",.1f"),
    ("wasted", "wasted_share", ".0%"),
    ("padding", "padding_share", ".0%"),
    ("KV waste", "kv_waste", ".0%"),
    ("preempt", "preemptions", "d"),
    ("busy", "device_busy", ".0%"),
    ("MFU", "mfu", ".0%"),
    ("MBU", "mbu", ".0%"),
    ("others", "others", ".0%"),
    ("TTFT p50", "ttft_s.p50", ".2f"),
    ("p99", "ttft_s.p99", ".2f"),
    ("gap p50", "gap_s.p50", ".3f"),
    ("p99", "gap_s.p99", ".3f"),
    ("e2e p50", "e2e_s.p50", ".2f"),
    ("p99", "e2e_s.p99", ".2f"),
    ("goodput", "goodput_share", ".0%"),
    ("$/M tok", "cost_per_million_tokens", ".2f"),
)


# columns of a table that fits a terminal: eight, with the preset and the rate; all figures are in the report
FIRST = ("output_tok_s", "wasted_share", "others", "ttft_s.p99", "gap_s.p99", "goodput_share")
HEADINGS = {"ttft_s.p99": "TTFT p99", "gap_s.p99": "gap p99"}  # where the column before it is left out


def compare_table(rows: list[dict[str, Any]]) -> str:
    """One line per preset and rate; times in seconds."""
    columns = [(HEADINGS.get(path, name), path, form) for name, path, form in COLUMNS if path in FIRST]

    def value(row: dict[str, Any], path: str, form: str) -> str:
        found: Any = row
        for part in path.split("."):
            found = found[part]
        return "?" if found is None else format(found, form)

    head = ["preset", "req/s", *(name for name, _, _ in columns)]
    lines = [[row["label"], f"{row['rate']:g}", *(value(row, path, form) for _, path, form in columns)] for row in rows]
    wide = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    shown = [
        "  ".join(f"{text:<{wide[0]}}" if i == 0 else f"{text:>{wide[i]}}" for i, text in enumerate(line))
        for line in [head, *lines]
    ]
    table = "\n".join([shown[0], "-" * len(shown[0]), *shown[1:]])
    return under_banner(table, [noise_in(row) for row in rows])


def giant_table(rows: list[dict[str, Any]]) -> str:
    """Largest gap of the streams and the giant's first token, per prefill policy."""
    lines = ["prefill    largest gap s  of inline  giant's TTFT s  of inline"]
    lines += [
        f"{row['prefill']:<9}  {row['largest_gap_s']:>13.3f}  {row['gap_of_inline']:>8.2f}x  "
        f"{row['giant_ttft_s']:>14.3f}  {row['ttft_of_inline']:>8.2f}x{_remark(row)}"
        for row in rows
    ]
    return under_banner("\n".join(lines), [noise_in(row) for row in rows])
