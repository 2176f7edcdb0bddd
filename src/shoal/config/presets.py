"""Presets: how known systems batch, as settings of this engine.

Each sets scheduling axes only, so that all run on the same model code, kernels and hardware and differ only in what is
scheduled. `differs` is one line on where the preset departs from the original. Knows names and values, nothing else.
"""

from dataclasses import dataclass
from typing import Any

from shoal.core.names import pick
from shoal.errors import BadConfig


@dataclass(frozen=True)
class Preset:
    """Settings of EngineConfig by name."""

    settings: dict[str, Any]
    does: str
    differs: str


def _preset(does: str, differs: str, **settings: Any) -> Preset:
    return Preset(settings, does, differs)


PRESETS: dict[str, Preset] = {
    "transformers": _preset(
        "plain padded generate: a fixed group, padded to the longest, returned when the slowest ends",
        "recomputes a request when KV runs out; the original would run out of memory",
        batching="static", layout="padded", prefill="inline", memory="ondemand", when_short="recompute",
        prefix_caching=False, watermark=0.0, depth=1,
    ),
    "fastertransformer": _preset(
        "a fixed group, padded, with KV reserved for the longest answer",
        "the original removes prompt padding from its linear layers",
        batching="static", layout="padded", prefill="inline", memory="reserve", when_short="wait",
        prefix_caching=False, depth=2,
    ),
    "classic-dynamic": _preset(
        "a model server's dynamic batcher: a group closes by size or by a time window",
        "the group is one batch of sequences; classic servers batch any tensors",
        batching="dynamic", layout="padded", prefill="inline", memory="reserve", when_short="wait",
        prefix_caching=False, depth=1,
    ),
    "orca": _preset(
        "iteration-level batching, whole prompts beside decodes, KV reserved for max_tokens",
        "attention is one ragged kernel here; the original batches all but attention",
        batching="continuous", layout="ragged", prefill="inline", memory="reserve", when_short="wait",
        prefix_caching=False, depth=1,
    ),
    "tgi": _preset(
        "decodes pause while new prompts are computed; KV reserved for the worst case",
        "the original also limits how often waiting prompts may interrupt the decodes",
        batching="continuous", layout="ragged", prefill="exclusive", memory="reserve", when_short="wait",
        prefix_caching=True, depth=1,
    ),
    "vllm": _preset(
        "paged KV on demand, chunked prefill, the newest request is recomputed when blocks run out",
        "the original's prefix cache uses other hash functions; scheduling is the same idea",
        batching="continuous", layout="ragged", prefill="chunked", memory="ondemand", when_short="recompute",
        prefix_caching=True, watermark=0.0, depth=2,
    ),
    "sglang": _preset(
        "predicted reservation, prompts in separate passes, retraction when the prediction was too low",
        "the prediction is a learned quantile of output lengths; the original adapts one global ratio",
        batching="continuous", layout="ragged", prefill="exclusive", memory="predict", when_short="recompute",
        prefix_caching=True, depth=2,
    ),
    "trtllm-no-evict": _preset(
        "GUARANTEED_NO_EVICT: a request starts only if its worst case fits",
        "context chunking is off here",
        batching="continuous", layout="ragged", prefill="inline", memory="reserve", when_short="wait",
        prefix_caching=True, depth=2,
    ),
    "trtllm-max-utilization": _preset(
        "MAX_UTILIZATION: as many requests as fit now, some paused when KV runs out",
        "context chunking is off here; paused requests are recomputed",
        batching="continuous", layout="ragged", prefill="inline", memory="ondemand", when_short="recompute",
        prefix_caching=True, watermark=0.0, depth=2,
    ),
    "lmdeploy": _preset(
        "a persistent batch that admits at once and evicts when blocks run out, prompts apart from decodes",
        "the original evicts the least recently used; here the newest is preempted",
        batching="continuous", layout="ragged", prefill="exclusive", memory="ondemand", when_short="recompute",
        prefix_caching=False, watermark=0.0, depth=1,
    ),
    "sarathi": _preset(
        "stall-free: small prompt chunks beside decodes, so that all passes take about equally long",
        "the chunk is fixed; the original derives it from a latency target",
        batching="continuous", layout="ragged", prefill="chunked", memory="ondemand", when_short="recompute",
        prefix_caching=False, watermark=0.0, chunk_tokens=64, depth=1,
    ),
    "splitwise": _preset(
        "prompts on one engine, answers on another, KV sent in between, as DistServe does; they share the machine",
        "KV is sent by prompt chunk and not by layer; the original adds a third, mixed pool of machines",
        batching="continuous", layout="ragged", prefill="disaggregated", memory="ondemand", when_short="recompute",
        prefix_caching=True, watermark=0.01, depth=None,
    ),
    "shoal": _preset(
        "chunked prefill, paged KV on demand with a few blocks kept free, prefix cache, two passes in flight on a GPU",
        "this is the original",
        batching="continuous", layout="ragged", prefill="chunked", memory="ondemand", when_short="recompute",
        prefix_caching=True, watermark=0.01, depth=None,
    ),
}  # fmt: skip


def preset_of(name: str) -> Preset:
    """A preset, or one with settings changed: PRESET+option=value+…

    >>> preset_of("shoal+order=sjf+depth=1").settings["order"]
    'sjf'
    """
    base, *changes = name.split("+")
    found = pick(PRESETS, base, "preset")
    if not changes:
        return found
    settings = dict(found.settings)
    for change in changes:
        option, equals, value = change.partition("=")
        if not equals or not option:
            raise BadConfig(f"{name!r}: after a preset's name write +option=value, such as {base}+order=sjf")
        settings[option.replace("-", "_")] = _value(value)
    return Preset(settings, f"{found.does}; with {', '.join(changes)}", found.differs)


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
