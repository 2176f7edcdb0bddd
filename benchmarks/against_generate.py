"""transformers' own generate against Shoal's batching policies, on the same requests and weights.

    python benchmarks/against_generate.py --requests 32 --group 8 [--json out.json]

Random weights in the SmolLM2-135M shape, float32. generate() gets left-padded groups and runs each to its longest
answer; Shoal runs the same lengths as static, dynamic, padded continuous and ragged continuous. All requests are
present from the start, so a dynamic window never waits. Prints useful output tokens per second and the ratio to
generate.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import transformers

from shoal.bench.cpu_noise import NoiseWatch, banner, noise_figures
from shoal.bench.record import Promise, summarise
from shoal.bench.replay import replay
from shoal.build import assemble, load
from shoal.config.engine import EngineConfig
from shoal.workload.prompts import make_prompts
from shoal.workload.synthetic import draw_lengths
from shoal.workload.traces import TraceRequest, fit

SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "rope_theta": 100000.0,
}  # fmt: skip
WAYS = {
    "static, padded": {"batching": "static", "layout": "padded", "prefill": "inline", "memory": "reserve"},
    "dynamic, padded": {"batching": "dynamic", "layout": "padded", "prefill": "inline", "memory": "reserve"},
    "continuous, padded": {"layout": "shrink", "prefill": "inline"},
    "continuous, ragged": {},
}


@torch.inference_mode()
def run_generate(model: torch.nn.Module, trace: list[TraceRequest], prompts: list[list[int]], group: int) -> float:
    """Seconds for all groups, each padded on the left to its longest prompt and run to its longest answer."""
    begun = time.perf_counter()
    for first in range(0, len(trace), group):
        some = prompts[first : first + group]
        longest = max(len(prompt) for prompt in some)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in some])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in some])
        count = max(one.output for one in trace[first : first + group])
        model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="requests in a group, and slots of the engine")
    parser.add_argument("--prompt-scale", type=float, default=1 / 32)
    parser.add_argument("--output-scale", type=float, default=1 / 12)
    parser.add_argument("--json", metavar="OUT")
    args = parser.parse_args()
    trace = fit(
        draw_lengths("azure-conv", args.requests), scale=args.prompt_scale, output_scale=args.output_scale
    ).requests
    prompts = make_prompts(trace, SHAPE["vocab_size"])
    outputs = sum(one.output for one in trace)
    rows = []
    watch = NoiseWatch()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
        model.save_pretrained(folder)
        run_generate(model, trace[:2], prompts[:2], 2)
        seconds = run_generate(model, trace, prompts, args.group)
        rows.append(
            {"way": "transformers generate", "seconds": seconds, "output_tok_s": outputs / seconds, "padding": None}
        )
        del model
        loaded = load(EngineConfig(model=str(Path(folder)), dtype="float32"))
    longest = max(one.output for one in trace)
    for way, settings in WAYS.items():
        config = {"max_num_seqs": args.group, "group_size": args.group, "prefix_caching": False, **settings}
        loop = assemble(loaded, EngineConfig.from_mapping(config)).loop
        run = replay(loop, trace, prompts, preset=way, label=way, rate=0, max_tokens=longest)
        loop.close()
        figures = summarise(run, Promise(1, 1), 0)
        rows.append(
            {
                "way": way,
                "seconds": run.seconds,
                "output_tok_s": figures["output_tok_s"],
                "padding": figures["padding_share"],
            }
        )
    noise = watch.noise()
    if headline := banner([noise]):
        print(headline)
    for row in rows:
        row |= noise_figures(noise)
        row["of_generate"] = row["output_tok_s"] / rows[0]["output_tok_s"]
        padding = "" if row["padding"] is None else f"{row['padding']:.0%}"
        print(
            f"{row['way']:<24}{row['seconds']:>8.1f} s {row['output_tok_s']:>8.1f} tok/s "
            f"{row['of_generate']:>6.2f}x {padding:>6}"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
