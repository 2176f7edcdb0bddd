"""Shoal beside the engines that somebody with a CPU could install instead: one workload, one machine, one table.

    python benchmarks/cpu_peers.py --workload cpu64.json --model DIR --python vllm=VENV/bin/python

Runs Shoal and every peer that can be imported, installs none. Each may live in an environment of its own (`--python
NAME=INTERPRETER`). Every figure is the best of `--runs`, and the runs alternate between the engines, each in a fresh
process. `--model` is a Hugging Face folder with weights; llama.cpp needs `--gguf` and OpenVINO `--openvino` (a folder
made by `optimum-cli export openvino`), made from the same model. Without `--model`, Shoal alone runs, on SmolLM2 or on
`--config`, a config.json with random weights.

Measured: output tokens per second over the workload, all requests at once, at most 32 running; decode and prefill speed
of one request; seconds to load; peak memory. transformers runs padded batches of 32 (`generate`). llama-cpp-python runs
one request at a time and has no workload figure. The workers for vLLM and OpenVINO follow their documentation.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

MODULES = {
    "shoal": "shoal",
    "vllm": "vllm",
    "openvino": "openvino_genai",
    "llama.cpp": "llama_cpp",
    "transformers": "transformers",
}
SLOTS = 32
ONE, PREFILL = (32, 128), (1024, 1)  # one request: prompt and output tokens
Lengths = Sequence[tuple[int, int]]
Run = Callable[[Lengths, list[list[int]]], None]


def prompts_of(lengths: Lengths, vocab: int) -> list[list[int]]:
    source = Random(0)
    return [[source.randrange(10, vocab - 10) for _ in range(prompt)] for prompt, _ in lengths]


def shoal(args: argparse.Namespace) -> tuple[Run, int]:
    from shoal import LLM, SamplingParams

    more = {"load_format": "dummy"} if args.config else {}
    llm = LLM(
        args.config or args.model,
        dtype=args.dtype,
        quantization=args.quantization,
        threads=args.threads,
        max_num_seqs=SLOTS,
        prefix_caching=False,
        **more,
    )

    def run(lengths: Lengths, prompts: list[list[int]]) -> None:
        params = [SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True) for _, output in lengths]
        llm.generate(prompts, params)

    return run, vocab_of(args.config) if args.config else llm.tokenizer.vocab_size


def vllm(args: argparse.Namespace) -> tuple[Run, int]:
    from vllm import LLM, SamplingParams

    llm = LLM(args.model, dtype=args.dtype, enforce_eager=True, max_num_seqs=SLOTS, enable_prefix_caching=False)

    def run(lengths: Lengths, prompts: list[list[int]]) -> None:
        params = [SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True) for _, output in lengths]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return run, vocab_of(args.model)


def openvino(args: argparse.Namespace) -> tuple[Run, int]:
    import openvino_genai as genai
    from openvino import Tensor

    settings = genai.SchedulerConfig()
    settings.cache_size, settings.max_num_seqs, settings.max_num_batched_tokens = 4, SLOTS, 512
    settings.enable_prefix_caching = False
    pipe = genai.ContinuousBatchingPipeline(args.openvino, settings, "CPU")

    def run(lengths: Lengths, prompts: list[list[int]]) -> None:
        import numpy as np

        params = []
        for _, output in lengths:
            one = genai.GenerationConfig()
            one.max_new_tokens, one.ignore_eos, one.do_sample = output, True, False
            params.append(one)
        pipe.generate([Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts], params)

    return run, vocab_of(args.openvino)


def llama_cpp(args: argparse.Namespace) -> tuple[Run, int]:
    from llama_cpp import Llama

    llm = Llama(args.gguf, n_ctx=2048, n_batch=512, n_threads=args.threads, n_threads_batch=args.threads, verbose=False)

    def run(lengths: Lengths, prompts: list[list[int]]) -> None:
        for (_, output), prompt in zip(lengths, prompts, strict=True):
            llm.reset()
            llm.eval(prompt)
            for _ in range(output - 1):
                llm.eval([llm.sample(temp=0.0)])

    return run, llm.n_vocab()


def transformers(args: argparse.Namespace) -> tuple[Run, int]:
    import torch
    from transformers import AutoModelForCausalLM

    if args.threads:
        torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()

    def run(lengths: Lengths, prompts: list[list[int]]) -> None:
        for first in range(0, len(lengths), SLOTS):
            group, most = prompts[first : first + SLOTS], max(output for _, output in lengths[first : first + SLOTS])
            width = max(map(len, group))
            ids = torch.tensor([[0] * (width - len(one)) + one for one in group])
            mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in group])
            with torch.inference_mode():
                model.generate(
                    ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0
                )

    return run, model.config.vocab_size


WORKERS = {
    "shoal": shoal,
    "vllm": vllm,
    "openvino": openvino,
    "llama.cpp": llama_cpp,
    "transformers": transformers,
}


def vocab_of(folder: str) -> int:
    with open(f"{folder}/config.json") as file:
        return int(json.load(file)["vocab_size"])


def work(args: argparse.Namespace) -> None:
    """One engine, in its own process: the last line printed is its figures."""
    begun = time.perf_counter()
    run, vocab = WORKERS[args.worker](args)
    figures: dict[str, Any] = {"load_s": time.perf_counter() - begun}

    def timed(lengths: Lengths) -> float:
        prompts = prompts_of(lengths, vocab)
        started = time.perf_counter()
        run(lengths, prompts)
        return time.perf_counter() - started

    timed([(16, 4)])
    first_s = timed([(ONE[0], 1)])
    figures["one_tok_s"] = (ONE[1] - 1) / (timed([ONE]) - first_s)
    figures["prefill_tok_s"] = PREFILL[0] / timed([PREFILL])
    if args.worker != "llama.cpp" and not args.one_only:
        with open(args.workload) as file:
            lengths = [(int(one), int(other)) for one, other in json.load(file)][: args.requests]
        figures["output_tok_s"] = sum(output for _, output in lengths) / timed(lengths)
    figures["memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print("\n" + json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, help="JSON list of [prompt, output] lengths")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--model", help="Hugging Face folder with weights")
    parser.add_argument("--config", help="folder with a config.json, for Shoal alone with random weights")
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--openvino", help="the same model for OpenVINO")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none", help="of Shoal's weights")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--one-only", action="store_true", help="leave the workload out")
    parser.add_argument("--only", default=",".join(MODULES), help="of these engines; commas between")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=INTERPRETER")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=tuple(WORKERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    interpreters = dict(one.split("=", 1) for one in args.python)
    needs = {"vllm": args.model, "transformers": args.model, "openvino": args.openvino, "llama.cpp": args.gguf}
    engines, best = [], {}
    for name in args.only.split(","):
        python = interpreters.get(name, sys.executable)
        if not needs.get(name, True):
            print(f"{name}: left out, there is no model for it", file=sys.stderr)
        elif subprocess.run([python, "-c", f"import {MODULES[name]}"], capture_output=True, check=False).returncode:
            print(f"{name}: not installed in {python}", file=sys.stderr)
        else:
            engines.append((name, python))
    for _ in range(args.runs):
        for name, python in engines:
            done = subprocess.run(
                [python, __file__, *sys.argv[1:], "--worker", name], stdout=subprocess.PIPE, text=True, check=False
            )
            if done.returncode:
                print(f"{name}: failed", file=sys.stderr)
                continue
            found, so_far = json.loads(done.stdout.strip().splitlines()[-1]), best.setdefault(name, {})
            for key, value in found.items():
                better = min if key in ("load_s", "memory_gb") else max
                so_far[key] = better(value, so_far.get(key, value))
    if args.json:
        print(json.dumps(best))
        return
    print(table(best))


def table(best: dict[str, dict[str, float]]) -> str:
    """Figures, and Shoal's over each peer's."""
    columns = [
        ("workload tok/s", "output_tok_s"),
        ("one request", "one_tok_s"),
        ("prefill", "prefill_tok_s"),
    ]
    lines = ["engine        " + "".join(f"{title:>26}" for title, _ in columns) + "    load s  memory GB"]
    own = best.get("shoal", {})
    for name, figures in best.items():
        line = f"{name:<14}"
        for _, key in columns:
            cell = "-" if key not in figures else f"{figures[key]:,.1f}"
            if key in figures and key in own and name != "shoal":
                cell += f" (Shoal {own[key] / figures[key]:.2f}x)"
            line += f"{cell:>26}"
        lines.append(f"{line}{figures['load_s']:>10.1f}{figures['memory_gb']:>11.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
