"""shoal bench accuracy: what a type of weights or KV costs over real text, in perplexity and in likeliest tokens."""

import argparse
import gzip
import json
import math
import time
from operator import eq
from pathlib import Path
from typing import Any

from shoal.cli.checks import check_early
from shoal.cli.common import new_command
from shoal.config.engine import EngineConfig, add_flags
from shoal.core.params import SamplingParams
from shoal.errors import BadConfig

TOPIC = 2000  # characters that are read of each topic, so that many are
# without a dtype: as in the first of the types, if that names one
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "kv-fp8": {"kv_dtype": "fp8"},
    "fp8+kv-fp8": {"quantization": "fp8", "kv_dtype": "fp8"},
}


def add_accuracy(kinds: Any) -> None:
    parser = new_command(
        kinds,
        "accuracy",
        "perplexity and likeliest tokens over texts for several types of weights and KV, compared with the first",
        "shoal bench accuracy --types float32,bfloat16,int8 --tokens 20000",
        run_accuracy,
    )
    parser.add_argument("--model", "-m", default=None, help="folder, .gguf file or hub name (default: SmolLM2)")
    parser.add_argument(
        "--texts",
        default=None,
        metavar="FILE",
        help="plain text, or JSON lines with `turns` or `text`; may be .gz (default: the language reference in Python)",
    )
    parser.add_argument(
        "--tokens", type=int, default=20000, help="approximate number of tokens of text (default: 20000)"
    )
    parser.add_argument(
        "--types", default="float32,bfloat16,int8", help=f"some of {', '.join(SETTINGS)}, separated by commas"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_flags(parser)


def read_texts(path: str | None) -> list[str]:
    """Paragraphs of a text file, or the turns of each line of JSON; without a file topics of Python's own help."""
    if path is None:
        from pydoc_data.topics import topics

        return [topics[name][:TOPIC] for name in sorted(topics)]
    try:
        raw = Path(path).read_bytes()
        text = (gzip.decompress(raw) if path.endswith(".gz") else raw).decode()
        if ".jsonl" not in path:
            return [part for part in text.split("\n\n") if part.strip()]
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        return ["\n\n".join(line["turns"]) if "turns" in line else str(line["text"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadConfig(f"cannot read texts from {path}: {error}") from error


def run_accuracy(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from shoal.bench.cpu_noise import banner, noise_in

    names = args.types.split(",")
    for name in names:
        if name not in SETTINGS:
            raise BadConfig(f"--types: {name!r} is unknown; known: {', '.join(SETTINGS)}")
    texts = read_texts(args.texts)
    check_early(EngineConfig.from_args(args))
    texts = texts[:: max(1, len(texts) * 30 // max(args.tokens, 1))]  # spread over the whole file
    rows: list[dict[str, Any]] = []
    likeliest: list[list[int]] = []
    for name in names:
        given = {**asdict(EngineConfig.from_args(args)), "dtype": SETTINGS[names[0]].get("dtype", "auto")}
        figures, found = measured({**given, **SETTINGS[name], "model": args.model}, texts, args.tokens)
        likeliest.append(found)
        row = {"type": name, **figures}
        row["ratio"] = row["perplexity"] / (rows[0]["perplexity"] if rows else row["perplexity"])
        row["same_top1"] = sum(map(eq, found, likeliest[0])) / len(found)
        rows.append(row)
    if args.json:
        print(json.dumps(rows))
        return 0
    if headline := banner([noise_in(row) for row in rows]):
        print(f"{headline}\n")
    print("type        perplexity   versus the first  same top-1    tokens  seconds")
    for row in rows:
        change = f"{row['ratio'] - 1:+.3%}"
        print(
            f"{row['type']:<10}  {row['perplexity']:>10.4f}  {change:>17}  {row['same_top1']:>10.2%}  "
            f"{row['tokens']:>8,}  {row['seconds']:>7.1f}"
        )
    return 0


def measured(options: dict[str, Any], texts: list[str], most: int) -> tuple[dict[str, Any], list[int]]:
    """Figures over all tokens but the first of each text: perplexity is exp of the mean negative logprob. And the token
    that the model held likeliest at each of these places."""
    from shoal.bench.cpu_noise import NoiseWatch, noise_figures
    from shoal.llm.llm import LLM

    watch, begun = NoiseWatch(), time.perf_counter()
    with LLM(**options) as llm:
        prompts: list[list[int]] = []
        for text in texts:
            ids = llm.encode(text)[: llm.max_model_len - 2]
            if len(ids) > 1 and sum(map(len, prompts)) < most:
                prompts.append(ids)
        if not prompts:
            raise BadConfig("no text has two tokens or more; give other texts")
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        outputs = llm.generate(prompts, params)
    found = [one for output in outputs for one in output.prompt_logprobs or [] if one is not None]
    figures = {
        "perplexity": math.exp(-sum(one.logprob for one in found) / len(found)),
        "tokens": len(found),
        "seconds": time.perf_counter() - begun,
        **noise_figures(watch.noise()),
    }
    return figures, [one.top_tokens[0] for one in found]
