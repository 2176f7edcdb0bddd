"""Shoal beside other engines for CPUs: one workload, one machine, one table.

    python benchmarks/cpu_peers.py --workload cpu64 --model DIR --gguf q8_0=FILE --openvino f16=DIR \\
      --python vllm=VENV/bin/python --figures runs.jsonl

Runs Shoal and every peer that can be imported, installs none. Each may have its own environment (`--python
NAME=INTERPRETER`). Every figure is the best of `--runs`, and the runs alternate between the engines, each in a fresh
process. `--model` is a Hugging Face folder with weights; llama.cpp needs GGUF files and OpenVINO folders made by
`optimum-cli export openvino`, from the same model (benchmarks/random_model.py makes all but the last). Without weights
in `--model`, Shoal alone runs, with random ones.

An engine runs once for each of its variants: `--only shoal:float32,shoal:int8,llama.cpp:q8_0`. A long comparison can be
done in pieces: `--figures` keeps every run in a file, and the table is made of all runs in it (`--runs 0`: only that).

Measured: output tokens per second over the workload, all requests at once, at most 32 running; decode and prefill speed
of one request; seconds to load; peak memory. The set-up of each engine is in cpu_engines.py. Owns the order of runs and
the table; knows no engine.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.bench.cpu_noise import NoiseWatch, noise_figures, noise_in, under_banner
from shoal.workload.named import find_lengths

MODULES = {
    "shoal": "shoal",
    "vllm": "vllm",
    "openvino": "openvino_genai",
    "openvino-padded": "openvino_genai",
    "llama.cpp": "llama_cpp",
    "transformers": "transformers",
    "transformers-cb": "transformers",
}
VARIANTS = {
    "shoal": ("float32", "bfloat16", "int8"),
    "vllm": ("float32", "bfloat16"),
    "transformers": ("float32", "bfloat16"),
    "transformers-cb": ("float32", "bfloat16"),
}
EIGHT_BITS = ("int8", "q8_0")
COLUMNS = (("workload tok/s", "output_tok_s"), ("decode tok/s", "one_tok_s"), ("prefill tok/s", "prefill_tok_s"))
COSTS = (("load s", "load_s"), ("memory GB", "memory_gb"))
WORKER = Path(__file__).with_name("cpu_engines.py")
Best = dict[str, dict[str, float]]
Row = tuple[str, str, str]  # engine, variant, path of the model
Lengths = Sequence[Sequence[int]]


def options(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", help="a name such as cpu64, or a JSON file of lengths; none: single requests")
    parser.add_argument("--requests", type=int, help="use only the first N")
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--gguf", action="append", default=[], metavar="VARIANT=FILE", help="for llama.cpp")
    parser.add_argument(
        "--openvino",
        action="append",
        default=[],
        metavar="VARIANT=FOLDER",
        help="f32, f16 or bf16: the inference precision; any other name leaves it to OpenVINO",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--llama-context", type=int, default=24576, help="KV cells of llama.cpp for all sequences")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="engines, or ENGINE:VARIANT, separated by commas")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=INTERPRETER")
    parser.add_argument("--figures", type=Path, help="file to which runs are appended; the table covers all runs in it")
    parser.add_argument("--json", action="store_true")
    return parser


def rows_of(args: argparse.Namespace) -> list[Row]:
    """Everything that can run."""
    exported = pairs(args.openvino)
    paths = {"llama.cpp": pairs(args.gguf), "openvino": exported, "openvino-padded": exported}
    weights = any(Path(args.model).glob("*.safetensors"))
    rows = []
    for engine in MODULES:
        if engine in paths:
            rows += [(engine, variant, path) for variant, path in paths[engine].items()]
        elif weights or engine == "shoal":
            rows += [(engine, variant, args.model) for variant in VARIANTS[engine]]
    if args.only:
        names = args.only.split(",")
        unknown = {one for one in names if one.split(":")[0] not in MODULES}
        if unknown:
            raise SystemExit(f"--only: there is no engine {', '.join(unknown)}; known: {', '.join(MODULES)}")
        rows = [row for row in rows if row[0] in names or f"{row[0]}:{row[1]}" in names]
        unlisted = {one for one in names if ":" in one} - {f"{engine}:{variant}" for engine, variant, _ in rows}
        free = [one.split(":", 1) for one in sorted(unlisted)]
        rows += [(engine, variant, args.model) for engine, variant in free if engine in VARIANTS]
    return rows


def pairs(given: list[str]) -> dict[str, str]:
    for one in given:
        if "=" not in one:
            raise SystemExit(f"{one!r} should be a name, '=' and a path")
    return dict(one.split("=", 1) for one in given)


def environment(engine: str, threads: int) -> dict[str, str]:
    more = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if engine == "vllm":
        more |= {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return {**os.environ, **more}


def task_of(args: argparse.Namespace, row: Row, lengths: Lengths) -> dict[str, Any]:
    """What cpu_engines.py is to run."""
    engine, variant, path = row
    config = json.loads(Path(args.model, "config.json").read_text())
    return {
        "engine": engine,
        "variant": variant,
        "model": path,
        "dummy": not any(Path(args.model).glob("*.safetensors")),
        "vocab": config["vocab_size"],
        "threads": args.threads,
        "llama_context": args.llama_context,
        "lengths": lengths,
    }


def workload(args: argparse.Namespace) -> Lengths:
    found = find_lengths(args.workload) if args.workload else []
    return [[one.prompt, one.output] for one in found[: args.requests]]


def run_once(args: argparse.Namespace, row: Row, python: str) -> dict[str, Any] | None:
    engine, variant, _ = row
    lengths = workload(args)
    watch = NoiseWatch()
    done = subprocess.run(
        [python, str(WORKER), json.dumps(task_of(args, row, lengths))],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env=environment(engine, args.threads),
    )
    if done.returncode:
        print(f"{engine}:{variant} failed ({done.returncode})\n{done.stdout[-2000:]}", file=sys.stderr)
        return None
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {"row": f"{engine}:{variant}", "requests": len(lengths), **found, **noise_figures(watch.noise())}


def installed(rows: list[Row], interpreters: dict[str, str]) -> set[str]:
    found = set()
    for engine in sorted({engine for engine, _, _ in rows}):
        python = interpreters.get(engine, sys.executable)
        done = subprocess.run([python, "-c", f"import {MODULES[engine]}"], capture_output=True, text=True, check=False)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["killed"])[-1]
            print(f"{engine}: cannot be imported by {python}: {why}", file=sys.stderr)
        else:
            found.add(engine)
    return found


def best_of(runs: list[dict[str, Any]]) -> Best:
    best: Best = {}
    for run in runs:
        so_far = best.setdefault(run["row"], {})
        so_far["runs"] = so_far.get("runs", 0) + 1
        so_far["workloads"] = so_far.get("workloads", 0) + ("output_tok_s" in run)
        for _, key in COLUMNS + COSTS:
            better = min if key == "load_s" else max  # the worst peak memory: a run without the workload needs less
            if key in run:
                so_far[key] = better(run[key], so_far.get(key, run[key]))
    return best


def table(best: Best) -> str:
    """All figures, then each of Shoal's rows over the best peer of its class (8 bits, or more).

    Runs are counted twice: those with the workload, and all.
    """
    titles = [title for title, _ in COLUMNS + COSTS]
    lines = [f"{'':<26}{'runs':>5}" + "".join(f"{title:>16}" for title in titles)]
    for name, figures in best.items():
        cells = [f"{figures[key]:,.1f}" if key in figures else "-" for _, key in COLUMNS]
        cells += [f"{figures[key]:,.2f}" for _, key in COSTS]
        count = f"{figures['workloads']}/{figures['runs']}"
        lines.append(f"{name:<26}{count:>5}" + "".join(f"{cell:>16}" for cell in cells))
    for name in (name for name in best if name.startswith("shoal:")):
        small = name.endswith(EIGHT_BITS)
        peers = [one for one in best if not one.startswith("shoal:") and one.endswith(EIGHT_BITS) == small]
        cells = []
        for _, key in COLUMNS:
            theirs = max((best[one][key] for one in peers if key in best[one]), default=None)
            cells.append("-" if theirs is None or key not in best[name] else f"{best[name][key] / theirs:.2f}x")
        lines.append(f"{name + ' / best peer':<31}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def kept(path: Path | None) -> list[dict[str, Any]]:
    """The runs of earlier calls."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def keep(path: Path | None, run: dict[str, Any]) -> None:
    if path:
        with path.open("a") as file:
            file.write(json.dumps(run) + "\n")


def main() -> None:
    args = options(__doc__).parse_args()
    interpreters = pairs(args.python)
    rows = rows_of(args)
    usable = installed(rows, interpreters) if args.runs else set()
    runs = kept(args.figures)
    for _ in range(args.runs):
        for row in (row for row in rows if row[0] in usable):
            found = run_once(args, row, interpreters.get(row[0], sys.executable))
            if found is None:
                continue
            runs.append(found)
            keep(args.figures, found)
    best = best_of(runs)
    noises = [noise_in(run) for run in runs]
    print(json.dumps(best) if args.json else under_banner(table(best), noises))


if __name__ == "__main__":
    main()
