"""Speculative decoding with real weights: the speed of `--speculate` beside off, by kind of text and by load.

    python benchmarks/speculation.py --speculate grammar+suffix --rounds 7 --json figures.json --plots docs/img

One model, two engines over it, which differ in `--speculate` alone. Each round asks both for the same answer, in turns
and in changing order, and the answers must be equal to the token. Every round has another text, and a tenant of its
own, so that no drafter has seen the answer before. The requests are in speculation_prompts.py.

Speed is output tokens per second from the moment when every request has its first token. It is taken twice: by the
clock, and by the CPU time of this process, which other programs on the machine disturb less. A ratio is that of one
round, and figures are medians over the rounds. "tokens a pass" is what one request gets from one pass; "accepted" are
the draft tokens that were right, of those that passes verified.

`--load` measures so many requests at a time: open chats, and samples of one chat that quotes. `--draw FIGURES` draws
the pictures of an earlier run and measures nothing.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculation_prompts import QUESTIONS, WORKLOADS, Task, quote_sampled, talk, talk_sampled
from tqdm import tqdm

from shoal.bench.cpu_noise import NoiseWatch, banner, noise_figures
from shoal.build import Built, Loaded, assemble, load, need_tokenizer
from shoal.config.engine import EngineConfig
from shoal.core.job import GrammarSpec
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.errors import EngineError
from shoal.text.grammar import Grammars, grammars_of

Row = dict[str, Any]  # the figures of one workload or load
OFF = "off"
LOAD_TARGET = 0.98


@dataclass
class Measured:
    """One run of one engine: what came after every request had its first token."""

    tokens: int
    seconds: float
    cpu_s: float
    row_passes: int  # passes, counted once for each request that they gave tokens
    proposed: int
    accepted: int
    answers: list[list[int]]

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_tok_s(self) -> float:
        return self.tokens / self.cpu_s


class Bench:
    """The two engines, and how they are asked."""

    def __init__(self, engines: dict[str, Built], grammars: Grammars) -> None:
        self.engines = engines
        self.grammars = grammars

    def pair(
        self, tasks: Sequence[Task], tenants: Sequence[str], tokens: int, turn: int, to_the_end: bool = False
    ) -> dict[str, Measured]:
        """The same requests in both engines. to_the_end: they go on to the last token that they may have."""
        names = list(self.engines)
        found = {
            name: self.run(name, tasks, tenants, tokens, to_the_end) for name in names[turn % 2 :] + names[: turn % 2]
        }
        answers = [found[name].answers for name in names]
        if any(other != answers[0] for other in answers):
            raise SystemExit(f"the answers for {tenants[0]} are not equal: speculation has changed the text")
        return found

    def run(self, name: str, tasks: Sequence[Task], tenants: Sequence[str], tokens: int, to_the_end: bool) -> Measured:
        built = self.engines[name]
        requests = [
            self.request(task, tenant, number, tokens, to_the_end)
            for number, (task, tenant) in enumerate(zip(tasks, tenants, strict=True))
        ]
        for request in requests:
            built.loop.submit(request)
        begun: tuple[float, float] | None = None
        counts: Counter[str] = Counter()
        while not built.loop.idle:
            events = built.loop.step()
            if errors := [end.error for end in events.finished if end.error]:
                raise EngineError(f"a request failed: {errors[0]}")
            if begun is not None:
                counts["tokens"] += len(events.tokens)
                counts["row_passes"] += len(set(events.owners))
                counts["proposed"] += sum(events.proposed.values())
                counts["accepted"] += sum(events.accepted.values())
            elif all(request.outputs for request in requests):
                begun = time.perf_counter(), time.process_time()
        assert begun is not None
        seconds, cpu_s = time.perf_counter() - begun[0], time.process_time() - begun[1]
        answers = [request.output_tokens for request in requests]
        values = (counts[key] for key in ("row_passes", "proposed", "accepted"))
        return Measured(counts["tokens"], seconds, cpu_s, *values, answers)

    def request(self, task: Task, tenant: str, number: int, tokens: int, to_the_end: bool) -> Request:
        built = self.engines[OFF]
        ends: frozenset[int] = frozenset() if to_the_end else built.eos
        params = SamplingParams(temperature=task.temperature, max_tokens=tokens).resolved({})
        grammar = None
        if task.schema is not None:
            grammar = self.grammars.make(GrammarSpec("json", json.dumps(task.schema)))
        prompt = need_tokenizer(built).chat(task.chat)
        id = f"{tenant}/{number}"
        return Request(id, prompt, params, seed=number, stop_ids=ends, tenant=tenant, grammar=grammar)

    def text(self, tokens: Sequence[int]) -> str:
        return need_tokenizer(self.engines[OFF]).decode(tokens)


def figures(name: str, runs: Sequence[dict[str, Measured]], chosen: str, target: float | None) -> Row:
    """Medians over the rounds."""
    off, on = ([run[way] for run in runs] for way in (OFF, chosen))

    def ratio(of: Callable[[Measured], float]) -> float:
        return statistics.median(of(one) / of(other) for one, other in zip(on, off, strict=True))

    return {
        "name": name,
        "rounds": len(runs),
        "target": target,
        "off_tok_s": statistics.median(one.tok_s for one in off),
        "tok_s": statistics.median(one.tok_s for one in on),
        "ratio": ratio(lambda one: one.tok_s),
        "cpu_ratio": ratio(lambda one: one.cpu_tok_s),
        "ratios": [one.tok_s / other.tok_s for one, other in zip(on, off, strict=True)],
        "cpu_ratios": [one.cpu_tok_s / other.cpu_tok_s for one, other in zip(on, off, strict=True)],
        "tokens": statistics.median(one.tokens for one in on),
        "tokens_a_pass": sum(one.tokens for one in on) / sum(one.row_passes for one in on),
        "row_passes": sum(one.row_passes for one in on),
        "proposed": sum(one.proposed for one in on),
        "accepted": sum(one.accepted for one in on),
    }


def table(rows: Sequence[Row], first: str, chosen: str) -> str:
    lines = [
        f"{first:<24}{'off':>9}{chosen:>16} tok/s{'ratio':>9}{'by CPU':>9}{'target':>8}   tokens a pass   accepted",
    ]
    for row in rows:
        target = f"{row['target']:.2f}" if row["target"] else ""
        share = f"{row['accepted']} of {row['proposed']}" if row["proposed"] else "none verified"
        lines.append(
            f"{row['name']:<24}{row['off_tok_s']:>9.1f}{row['tok_s']:>16.1f}{row['ratio']:>15.2f}{row['cpu_ratio']:>9.2f}"
            f"{target:>8}{row['tokens_a_pass']:>16.2f}   {share}"
        )
    return "\n".join(lines)


# ---- what is measured ------------------------------------------------------------------------------------------------


Keep = Callable[[str, list[Row]], None]  # told the figures of "rows" or "load" so far, after each round


def by_workload(bench: Bench, names: Sequence[str], args: argparse.Namespace, keep: Keep) -> None:
    runs: dict[str, list[dict[str, Measured]]] = {name: [] for name in names}
    with tqdm(total=args.rounds * len(names), unit="run", desc="by workload") as bar:
        for turn in range(args.rounds):
            for name in names:
                task = WORKLOADS[name][0](turn)
                runs[name].append(bench.pair([task], [f"{name}/{turn}"], args.tokens, turn))
                if args.show:
                    bar.write(f"---- {name}, round {turn}\n{bench.text(runs[name][-1][OFF].answers[0])}")
                bar.update()
            keep("rows", [figures(name, runs[name], args.speculate, WORKLOADS[name][1]) for name in names])


def by_load(bench: Bench, counts: Sequence[int], args: argparse.Namespace, keep: Keep) -> None:
    """So many requests at a time, which go on to the last token that they may have."""
    runs: dict[tuple[str, int], list[dict[str, Measured]]] = {}
    wanted = [(kind, count) for count in counts for kind in args.load_kinds.split(",")]
    with tqdm(total=args.load_rounds * len(wanted), unit="run", desc="by load") as bar:
        for turn in range(args.load_rounds):
            for kind, count in wanted:
                tenants = [f"{kind}/{count}/{turn}/{number}" for number in range(count)]
                found = bench.pair(load_of(kind, count, turn), tenants, args.load_tokens, turn, to_the_end=True)
                runs.setdefault((kind, count), []).append(found)
                bar.update()
            keep("load", [load_row(kind, count, runs[kind, count], args.speculate) for kind, count in wanted])


def load_row(kind: str, count: int, runs: Sequence[dict[str, Measured]], chosen: str) -> Row:
    target = LOAD_TARGET if kind == "chat" and count >= 32 else None
    return {**figures(f"{count} {kind}", runs, chosen, target), "kind": kind, "requests": count}


def load_of(kind: str, count: int, turn: int) -> list[Task]:
    """Chats, half of them greedy; or samples of one chat that quotes, whose prompt they share."""
    if kind == "quote":
        return [quote_sampled(turn)] * count
    first = turn * count % len(QUESTIONS)
    return [(talk, talk_sampled)[number % 2](first + number) for number in range(count)]


# ---- the program -----------------------------------------------------------------------------------------------------


@contextmanager
def open_bench(args: argparse.Namespace, most: int) -> Iterator[Bench]:
    base = {"model": args.model, "threads": args.threads, "max_num_seqs": max(4, most), "kv_memory": args.kv_memory}
    configs = {way: EngineConfig.from_mapping({**base, "speculate": way}) for way in (OFF, args.speculate)}
    loaded: Loaded = load(configs[OFF], progress=True)
    engines = {way: assemble(loaded, config) for way, config in configs.items()}
    try:
        yield Bench(engines, grammars_of(loaded.files, need_tokenizer(engines[OFF])))
    finally:
        for built in engines.values():
            built.loop.close()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    names = list(WORKLOADS) if args.workloads == "all" else [name for name in args.workloads.split(",") if name]
    if unknown := set(names) - WORKLOADS.keys():
        raise SystemExit(f"--workloads: unknown {', '.join(unknown)}; choose from: {', '.join(WORKLOADS)}")
    counts = [int(count) for count in args.load.split(",") if count]
    kept: dict[str, Any] = {"speculate": args.speculate, "rows": [], "load": []}

    def keep(what: str, rows: list[Row]) -> None:
        kept[what] = rows
        kept.update(noise_figures(watch.noise()))
        if args.json:
            Path(args.json).write_text(json.dumps(kept, indent=1) + "\n")

    with open_bench(args, max(counts, default=1)) as bench:
        built = bench.engines[OFF]
        dtype = str(built.dtype).removeprefix("torch.")
        kept.update(model=built.files.name, dtype=dtype, threads=args.threads, tokens=args.tokens)
        for name in names[-1:] or ["open chat"]:  # warm-up, and the first figures of what passes cost
            bench.pair([WORKLOADS[name][0](11)], ["warm-up"], args.tokens // 2, 0)
        watch = NoiseWatch()
        if names:
            by_workload(bench, names, args, keep)
        if counts:
            by_load(bench, counts, args, keep)
        if headline := banner([watch.noise()]):
            print(headline)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculate", default="grammar+suffix", help="what is compared with off")
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--workloads", default="all", help="some of them, with commas; empty: none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--load", default="", metavar="N,N", help="also measure so many requests at a time")
    parser.add_argument("--load-kinds", default="chat,quote")
    parser.add_argument("--load-rounds", type=int, default=3)
    parser.add_argument("--load-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-memory", default="512MiB", help="of each engine")
    parser.add_argument("--show", action="store_true", help="print the answers")
    parser.add_argument("--json", metavar="OUT", help="keep the figures; written after each round")
    parser.add_argument("--plots", metavar="FOLDER", help="draw speculation.svg and speculation-load.svg, and as .png")
    parser.add_argument("--draw", metavar="FIGURES", help="draw an earlier run's --json instead of measuring")
    args = parser.parse_args()
    kept = json.loads(Path(args.draw).read_text()) if args.draw else measure(args)
    for what, first in (("rows", "one request"), ("load", "at a time")):
        if kept[what]:
            print(table(kept[what], first, kept["speculate"]))
    if args.plots:
        from speculation_plots import draw

        for path in draw(kept, Path(args.plots)):
            print(path)


if __name__ == "__main__":
    main()
