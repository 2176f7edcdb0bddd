"""Engine configuration: the user's options, parsed once into one frozen object.

Owns the name, default, help text and limits of every engine option; flags and keyword arguments are both derived from
the same table below. Nothing writes to a config afterwards. Knows no policy's internals and no torch.
"""

import argparse
import json
from collections.abc import Container, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any

from shoal.config.options import Options, option, parse_bytes, read_table
from shoal.config.presets import PRESETS
from shoal.config.speculate import USAGE, Speculate, check_draft
from shoal.core.names import pick
from shoal.core.tiers import DEFAULT as DEFAULT_TIERS
from shoal.core.tiers import Tiers
from shoal.errors import BadConfig, ImpossiblePair

# choices that cannot work together, with the reason
APART: dict[str, tuple[str]] = {"prefill": ("disaggregated",)}
SPLIT = {"tensor_parallel_size": range(2, 2**31)}
FP8_IS_WHOLE = "fp8 kernels do not add up over ranks; leave fp8 out, or use one process"
IMPOSSIBLE: tuple[tuple[Mapping[str, Container[object]], str], ...] = (
    (
        {"memory": ("ondemand", "predict"), "when_short": ("wait",)},
        "every running request may need a block while none is released, which is a deadlock; "
        "use memory=reserve, or when_short=recompute",
    ),
    (
        {"layout": ("padded", "shrink"), "speculates": ("yes",)},
        "drafts are rows of different lengths, and a rectangle would pad all others to them; use layout=ragged, or "
        "speculate=off",
    ),
    (
        {"layout": ("padded", "shrink"), "batch_invariant": (True,)},
        "sums over a rectangle depend on its size; use layout=ragged",
    ),
    (
        {"cpu_kernels": ("off",), "batch_invariant": (True,)},
        "plain torch adds in an order that depends on the batch; use cpu_kernels=auto",
    ),
    ({"quantization": ("fp8",), **SPLIT}, FP8_IS_WHOLE),
    ({"kv_dtype": ("fp8",), **SPLIT}, FP8_IS_WHOLE),
    (
        {"quantization": ("int4",), **SPLIT},
        "blocks of 4-bit weights are not split over ranks; use tensor_parallel_size=1, or quantization=none",
    ),
    (
        {**APART, "batching": ("static", "dynamic")},
        "a group is answered together, and its members would be on different engines; use batching=continuous",
    ),
    (
        {**APART, "prefix_caching": (False,)},
        "KV blocks travel under their names in the prefix cache; leave prefix_caching on",
    ),
    (
        {**APART, "when_short": ("swap", "auto")},
        "the host memory of a prefill engine is its outbox for KV blocks; use when_short=recompute",
    ),
    ({**APART, **SPLIT}, "the KV cache of an engine with several ranks is in parts; use tensor_parallel_size=1"),
)

SHOWN = {"speculates": "speculate"}  # what the user wrote, for a property in the table

SERVED_QUEUE = 1024  # default max_queue of a server, whose load is not under its control
LONGEST_WAIT_S = 1e8  # three years
# default sizes of a pass
SLOTS = {"cpu": 64, "cuda": 512}
PASS_TOKENS = {"cpu": 512, "cuda": 2048}
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Options):
    """Everything that shapes one engine. An option that does not exist is refused, never dropped.

    >>> EngineConfig.from_mapping({"block_size": 32}).block_size
    32
    """

    model: str | None = option(None, "folder, .gguf file or hub name; default: SmolLM2-135M-Instruct", group="model")
    load_format: str = option(
        "auto", "dummy: random weights from config.json alone", choices=("auto", "dummy"), group="model"
    )
    dtype: str = option("auto", "type of weights and KV", choices=DTYPES, group="model")
    quantization: str = option(
        "none",
        "8-bit weights with a scale per output, made while loading: int8 on CPUs, fp8 on NVIDIA GPUs; int4: 4-bit "
        "weights of GGUF, AWQ and GPTQ files stay as they are",
        choices=("none", "int8", "fp8", "int4"),
        group="model",
    )
    device: str = option(
        "auto", "where it computes; auto: cuda where there is a GPU", choices=("auto", "cpu", "cuda"), group="model"
    )
    chat_template: str | None = option(None, "file with a chat template instead of the model's own", group="model")
    special_tokens_in_messages: str = option(
        "text",
        "what a special token written in a chat message is: text, or tokens as the model's own",
        choices=("text", "tokens"),
        group="model",
    )
    max_model_len: int | None = option(None, "most tokens of one sequence; default: the model's own", parse=int)
    max_num_seqs: int | None = option(None, "most requests in one pass; default: 64, on a GPU 512", parse=int)
    max_num_batched_tokens: int | None = option(None, "most tokens in one pass; default: 512, on a GPU 2048", parse=int)
    block_size: int = option(16, "tokens in one KV block", parse=int, group="memory")
    kv_memory: int | None = option(
        None,
        "memory for the KV cache, of all processes together, such as 2GiB; default: a share of the free memory",
        parse=parse_bytes,
        group="memory",
    )
    kv_dtype: str = option(
        "auto",
        "type of keys and values; fp8: half the memory, with a scale per token and head; auto: as dtype",
        choices=("auto", "fp8"),
        group="memory",
    )
    kv_share: float | None = option(
        None,
        "share of the free memory for the KV cache, between 0 and 1; default: 0.5, on a GPU 0.9",
        parse=float,
        group="memory",
        also=("--gpu-memory-utilization",),
    )
    host_kv_memory: int | None = option(
        None,
        "host memory for KV blocks swapped out; default: none, or for swap and auto as much as the KV cache, at most "
        "4 GiB and a quarter of the free memory",
        parse=parse_bytes,
        group="memory",
    )
    prefix_caching: bool = option(
        True, "reuse the KV blocks of earlier requests for prompts with the same prefix", group="memory"
    )
    watermark: float = option(
        0.01,
        "share of KV blocks kept free for running requests when another is admitted, at least one each; 0: none",
        parse=float,
        group="memory",
    )
    preset: str | None = option(
        None, "batch as a known system does; other flags override it", choices=tuple(PRESETS), group="policy"
    )
    batching: str = option(
        "continuous", "when requests may join the batch", choices=("continuous", "static", "dynamic"), group="policy"
    )
    group_size: int = option(16, "requests in a static or dynamic group", parse=int, group="policy")
    window_ms: float = option(50.0, "longest wait for a dynamic group to fill", parse=float, group="policy")
    layout: str = option("ragged", "shape of a pass", choices=("ragged", "padded", "shrink"), group="policy")
    prefill: str = option(
        "chunked",
        "how much of a prompt per pass; disaggregated: chunks, in other engines than those that decode (shoal serve)",
        choices=("chunked", "inline", "exclusive", "disaggregated"),
        group="policy",
    )
    order: str = option(
        "fcfs",
        "which waiting request is admitted first",
        choices=("fcfs", "priority", "sjf", "fair", "slo"),
        group="policy",
    )
    tiers: str | None = option(
        None,
        "latency promises by tier: a YAML file, or its text, such as '{premium: {ttft: 0.3, itl: 0.04}, batch: {}}'",
        group="policy",
    )
    budget: str = option(
        "fixed",
        "size of a pass: fixed, or the largest that meets the promises of the running requests",
        choices=("fixed", "promise"),
        group="policy",
    )
    lane_tokens: int = option(
        0, "sequences longer than this run in separate passes; 0: all share passes", parse=int, group="policy"
    )
    long_share: float = option(
        0.25, "share of passes for those long sequences while others run", parse=float, group="policy"
    )
    headroom: float = option(
        0.0,
        "share of slots and KV blocks kept free for the highest tier, short requests, and (fair) idle tenants",
        parse=float,
        group="policy",
    )
    headroom_tokens: int = option(
        0, "requests of at most this many tokens count as short for headroom; 0: none", parse=int, group="policy"
    )
    priority_age: float = option(60.0, "seconds of waiting worth one step of priority", parse=float, group="policy")
    sjf_age: float = option(
        200.0, "work, in prompt tokens, that one second of waiting is worth", parse=float, group="policy"
    )
    memory: str = option(
        "ondemand",
        "KV blocks reserved for a request when it is admitted",
        choices=("ondemand", "reserve", "predict"),
        group="policy",
    )
    quantile: float = option(
        0.9, "quantile of output lengths that memory=predict reserves", parse=float, group="policy"
    )
    when_short: str = option(
        "recompute",
        "what happens to a preempted request when KV memory runs out",
        choices=("recompute", "swap", "auto", "drop", "wait"),
        group="policy",
    )
    max_preemptions: int = option(
        8,
        "after this many, a request is admitted only with every block it can need, and keeps them",
        parse=int,
        group="policy",
    )
    chunk_tokens: int = option(0, "most tokens of one prompt per pass; 0: limited by the pass only", parse=int)
    depth: int | None = option(
        None, "passes in flight: 2 plans the next while one computes; default: 2 on a GPU, 1 on a CPU", parse=int
    )
    tensor_parallel_size: int = option(
        1, "processes that the model is split over: one per GPU, or several on the CPUs", parse=int
    )
    threads: int | None = option(
        None,
        "CPU threads of each process; default: one per available CPU or per core, whichever is faster, within the CPU "
        "quota, on the fast cores of one socket",
        parse=int,
    )
    cpu_kernels: str = option(
        "auto",
        "instruction set of the C kernels on a CPU; off: plain torch; auto: the best available",
        choices=("auto", "amx", "avx512", "avx2", "neon", "portable", "off"),
    )
    batch_invariant: bool = option(
        False,
        "the same tokens whatever else is in the batch, bit for bit: always so on a CPU; on a GPU at the price of some "
        "speed",
    )
    speculate: str = option(
        "off",
        f"draft tokens and verify several of them in one pass; the text stays the same: {USAGE}",
        group="speculation",
    )
    draft_tokens: int = option(
        15,
        "most draft tokens of one request and pass; fewer are used where that is faster",
        parse=int,
        group="speculation",
    )
    draft_model: str | None = option(
        None,
        "draft model of speculate=draft, with the same vocabulary: folder, .gguf file or hub name; default: the model "
        "itself, with fewer layers or in 8 bits",
        group="speculation",
    )
    draft_layers: int | None = option(
        None, "use only so many first layers of the draft model; default: all", parse=int, group="speculation"
    )
    draft_quantization: str | None = option(
        None, "weights of the draft model; default: as quantization", choices=("none", "int8"), group="speculation"
    )
    seed: int | None = option(None, "makes the seeds of requests without one reproducible", parse=int)
    max_queue: int = option(
        0,
        f"most requests that may wait; more are refused; 0: no limit, {SERVED_QUEUE} in shoal serve",
        parse=int,
        group="admission",
    )
    max_wait: float | None = option(
        None, "most seconds a request may wait before it starts; default: no limit", parse=float, group="admission"
    )
    check: bool = option(False, "check every invariant after every pass (slow)")

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("block_size", "max_preemptions", "draft_tokens", "tensor_parallel_size"):
            self._at_least(name, 1)
        numbers = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_memory", "threads", "depth")
        for name in (*numbers, "draft_layers"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        for name in ("chunk_tokens", "lane_tokens", "headroom_tokens"):
            self._at_least(name, 0)
        if self.host_kv_memory is not None:
            self._at_least("host_kv_memory", 0)
        for name in ("long_share", "headroom"):
            if not 0 <= getattr(self, name) < 1:
                raise BadConfig(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
        if self.lane_tokens and not self.long_share:
            raise BadConfig("long_share must be above 0; otherwise long sequences never run while others do")
        self.read_tiers()
        own = {"model": self.draft_model, "layers": self.draft_layers, "quantization": self.draft_quantization}
        check_draft(self.speculate, own, self.quantization)
        self._at_least("group_size", 1)
        for name in ("priority_age", "sjf_age"):
            if not 0 < getattr(self, name) < 1e9:
                raise BadConfig(f"{name} must be a number above 0, not {getattr(self, name)}")
        self._at_least("window_ms", 0)
        self._at_least("max_queue", 0)
        if self.max_wait is not None and not 0 < self.max_wait <= LONGEST_WAIT_S:  # nor NaN
            raise BadConfig(f"max_wait must be above 0 and at most {LONGEST_WAIT_S:.0f} seconds, not {self.max_wait}")
        if not 0 < self.quantile <= 1:
            raise BadConfig(f"quantile must be above 0 and at most 1, not {self.quantile}")
        for impossible, reason in IMPOSSIBLE:
            if all(getattr(self, name) in values for name, values in impossible.items()):
                shown = [SHOWN.get(name, name) for name in impossible]
                pair = " with ".join(f"{name}={getattr(self, name)}" for name in shown)
                raise ImpossiblePair(f"{pair}: {reason}")
        if self.tensor_parallel_size > 1 and self.speculation.model:
            raise ImpossiblePair(
                f"speculate={self.speculate} with tensor_parallel_size={self.tensor_parallel_size}: a draft model is "
                "not split over ranks; use another drafter, such as suffix, or one process"
            )
        most = self.max_num_seqs or max(SLOTS.values())  # checked again once the device is known
        if self.batching in ("static", "dynamic") and self.group_size > most:
            raise ImpossiblePair(f"group_size {self.group_size} exceeds max_num_seqs {most}; such a group never fills")
        if self.kv_share is not None and not 0 < self.kv_share <= 1:
            raise BadConfig(f"kv_share must be above 0 and at most 1, not {self.kv_share}")
        if not 0 <= self.watermark < 1:
            raise BadConfig(f"watermark must be at least 0 and below 1, not {self.watermark}")

    @property
    def speculation(self) -> Speculate:
        """What `speculate` says."""
        return Speculate.read(self.speculate)

    def for_answers(self) -> "EngineConfig":
        """Itself, for an engine whose text will be read; raises BadConfig if that would have no meaning."""
        if self.speculation.synthetic is not None:
            raise BadConfig(
                f"speculate {self.speculate} is for benchmarks only: draft tokens are accepted by chance, so the text "
                "has no meaning; choose a drafter, or off"
            )
        return self

    @property
    def speculates(self) -> str:
        return "yes" if self.speculation.on else "no"

    @property
    def slots(self) -> int:
        """Most requests in one pass, on a CPU unless the config was settled for another device."""
        return self.max_num_seqs or SLOTS["cpu"]

    @property
    def pass_tokens(self) -> int:
        """Most tokens in one pass, likewise."""
        return self.max_num_batched_tokens or PASS_TOKENS["cpu"]

    def settled(self, device: str) -> "EngineConfig":
        """A copy with this device's defaults filled in."""
        slots = self.max_num_seqs or SLOTS[device]
        return replace(
            self, max_num_seqs=slots, max_num_batched_tokens=self.max_num_batched_tokens or PASS_TOKENS[device]
        )

    def divided(self, engines: int) -> "EngineConfig":
        """A copy for one of several engines that share the machine's memory.

        >>> EngineConfig(kv_memory=300).divided(3).kv_memory
        100
        """
        if engines == 1:
            return self
        return replace(
            self,
            kv_memory=None if self.kv_memory is None else max(1, self.kv_memory // engines),
            kv_share=(self.kv_share or 0.5) / engines,
            host_kv_memory=None if self.host_kv_memory is None else self.host_kv_memory // engines,
        )

    def read_tiers(self) -> Tiers:
        """The tiers; without any given, the defaults if the order needs them, else none."""
        if self.tiers is None:
            return Tiers.read(DEFAULT_TIERS if self.order == "slo" else None)
        return Tiers.read(read_table(self.tiers, "tiers"))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "EngineConfig":
        """From keyword arguments or a file's keys."""
        if values.get("preset") is not None:
            values = {**pick(PRESETS, values["preset"], "preset").settings, **values}
        table = {item.name: item for item in fields(cls)}
        parsed = {}
        for name, value in values.items():
            item = pick(table, name, "engine option")
            if name == "tiers" and isinstance(value, Mapping):  # a table in a file
                value = json.dumps(value)
            parsed[name] = parse_bytes(value) if item.metadata["parse"] is parse_bytes and value is not None else value
        return cls(**parsed)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "EngineConfig":
        """From what add_flags() put into the parser."""
        given = vars(args)
        return cls.from_mapping({item.name: given[item.name] for item in fields(cls) if item.name in given})


def add_flags(parser: argparse.ArgumentParser, config: Any = EngineConfig) -> None:
    """One flag for each option, except the model, which each command declares itself."""
    groups: dict[str, Any] = {}
    for item in fields(config):
        if item.name == "model":
            continue
        kind = item.metadata["group"]
        if kind not in groups:
            groups[kind] = parser.add_argument_group(f"{kind} options")
        add_flag(groups[kind], item)


def _for_argparse(parse: Any) -> Any:
    """argparse hides the message of a ValueError; this keeps it."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except BadConfig as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    parsed.__name__ = getattr(parse, "__name__", "value")
    return parsed


def add_flag(group: Any, item: "Field[Any]") -> None:
    flag = "--" + item.name.replace("_", "-")
    assert item.default is not MISSING
    if isinstance(item.default, bool):
        action = argparse.BooleanOptionalAction
        group.add_argument(flag, action=action, default=argparse.SUPPRESS, help=f"{item.metadata['help']}")
        return
    if isinstance(item.default, tuple):
        help = f"{item.metadata['help']}; repeatable"
        group.add_argument(flag, action="append", default=argparse.SUPPRESS, metavar=item.name.upper(), help=help)
        return
    shown = "" if item.default is None else f" (default: {item.default})"
    group.add_argument(
        flag,
        *item.metadata["also"],
        type=_for_argparse(item.metadata["parse"]),
        choices=item.metadata["choices"] or None,
        default=argparse.SUPPRESS,
        metavar=None if item.metadata["choices"] else item.name.upper(),
        help=item.metadata["help"] + shown,
    )
