"""What a draft model gains: SmolLM2 drafted for by its first layers and by itself in 8 bits, one request at a time.

    python benchmarks/draft_model.py [rounds]

Rounds alternate between the settings. CPU seconds are those of the whole process: on a machine that others use, they
say more than the time on the clock. "always" asks the draft model in every pass, whether that pays or not.
"""

import statistics
import sys
import time
from collections import Counter
from typing import Any

from shoal import LLM, SamplingParams

SETTINGS: dict[str, dict[str, Any]] = {
    "off": {},
    "int8": {"speculate": "draft", "draft_quantization": "int8"},
    "int8, always": {"speculate": "draft", "draft_quantization": "int8", "draft_tokens": 4},
    "first 10 layers": {"speculate": "draft", "draft_layers": 10},
    "first 10 layers, always": {"speculate": "draft", "draft_layers": 10, "draft_tokens": 4},
}
CHAT = "Tell me about the history of bread in Europe, and why sourdough came back."
TOKENS = 120


def measure(llm: LLM, params: SamplingParams) -> tuple[float, float, list[int], Counter[str]]:
    """(seconds, CPU seconds, tokens, drafts) of one answer."""
    counts: Counter[str] = Counter()
    step = type(llm.loop).step

    def counting(*args: Any) -> Any:
        events = step(llm.loop, *args)
        counts["proposed"] += sum(events.proposed.values())
        counts["accepted"] += sum(events.accepted.values())
        counts["passes"] += events.step >= 0
        return events

    llm.loop.step = counting  # type: ignore[method-assign]
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    [answer] = llm.generate([[{"role": "user", "content": CHAT}]], params)
    return time.perf_counter() - begun_s, time.process_time() - cpu_s, answer.outputs[0].token_ids, counts


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    llms = {name: LLM(dtype="float32", threads=1, kv_memory="256MiB", max_model_len=512, **more)
            for name, more in SETTINGS.items()}  # fmt: skip
    for name, llm in llms.items():
        if "always" in name:  # what its passes take stays unknown
            llm.loop.scheduler.policies.drafts.times.learn = lambda *passed: None  # type: ignore[attr-defined]
    for temperature in (0.0, 0.7):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=TOKENS, ignore_eos=True)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in llms}
        drafts: dict[str, Counter[str]] = {name: Counter() for name in llms}
        texts = set()
        for number in range(rounds + 1):
            for name, llm in llms.items():
                seconds, cpu_s, tokens, counts = measure(llm, params)
                texts.add(tuple(tokens))
                if number:  # the first answer also computes the prompt, and shows what passes take
                    found[name].append((seconds, cpu_s))
                    drafts[name] += counts
        print(f"temperature {temperature}: {TOKENS} tokens, {len(texts)} different answers")
        for name, values in found.items():
            seconds, cpu_s = (statistics.median(column) for column in zip(*values, strict=True))
            each = drafts[name]
            print(
                f"  {name:24} {seconds:6.2f} s  {cpu_s:6.2f} CPU s  {each['passes'] / rounds:6.1f} passes  "
                f"{each['accepted']} of {each['proposed']} draft tokens accepted",
                flush=True,
            )
    for llm in llms.values():
        llm.close()


if __name__ == "__main__":
    main()
