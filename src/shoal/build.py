"""Wiring: a config in, working objects out. The only room that knows everybody.

config ─► files ─► spec ─► weights ─► model ─► runner ─► executor ─┐
                      └──► KV size ─► scheduler ─► engine ─────────┴─► loop
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from shoal import kernels
from shoal.config.engine import EngineConfig
from shoal.core.clock import Clock, WallClock
from shoal.core.names import pick
from shoal.core.ports import Executor
from shoal.core.tiers import Tiers
from shoal.engine.engine import Engine
from shoal.engine.loop import EngineLoop
from shoal.errors import BadConfig, ModelError
from shoal.files.gguf import GgufFile
from shoal.files.source import ModelFiles, eos_ids, find_model, sampling_defaults
from shoal.kernels.cpu import keep_in
from shoal.kv.manager import KVManager
from shoal.models import Model, make_model
from shoal.models.spec import ModelSpec, spec_from_config
from shoal.runner.kvstore import KVStore, bytes_per_block
from shoal.runner.loader import ArrayReader, SafetensorsReader, dummy_weights, load_weights, pick_dtype, to_int8
from shoal.runner.runner import Runner
from shoal.runner.threaded import ThreadedExecutor
from shoal.runner.threads import choose_threads, release_threads
from shoal.sched.admission import Limits, Rules
from shoal.sched.batching import BATCHING, Batching, Dynamic, Static
from shoal.sched.budget import Fixed, Promise
from shoal.sched.lanes import Headroom, Lanes
from shoal.sched.layout import LAYOUT
from shoal.sched.memory import MEMORY, Memory, OnDemand, Predict
from shoal.sched.ordering import ORDER, Order, Priority, Sjf
from shoal.sched.preempt import PREEMPT, Auto, CopyTimes, Preempt
from shoal.sched.prefill import PREFILL
from shoal.sched.scheduler import Policies, Scheduler
from shoal.sched.slo import Slo
from shoal.sched.steptime import StepModel
from shoal.sched.tenants import LimitsOf, TenantLimits, no_limits
from shoal.text.tokenizer import Tokenizer, check_vocabulary, load_tokenizer

log = logging.getLogger(__name__)
MOST_HOST_BYTES = 4 * 2**30  # of host memory for KV blocks, where nobody says how much

GRAPHS_BYTES = 2**30


@dataclass(frozen=True)
class Loaded:
    """A model in memory, on which engines of any settings can be built."""

    files: ModelFiles
    spec: ModelSpec
    dtype: torch.dtype
    device: str
    model: Model
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class Built:
    """A loop ready to turn, and what its users must know about the model."""

    config: EngineConfig
    files: ModelFiles
    spec: ModelSpec
    dtype: torch.dtype
    device: str
    loop: EngineLoop
    tokenizer: Tokenizer | None
    eos: frozenset[int]
    defaults: dict[str, Any]  # of sampling, from generation_config.json
    limits: Limits
    kv_blocks: int


def build(
    config: EngineConfig,
    clock: Clock | None = None,
    progress: bool = False,
    limits_of: LimitsOf | None = None,
    in_idle_moments: bool = False,
    spare_folder: Path | None = None,
) -> Built:
    """Everything that serves one model in this process. `limits_of`: limits of each API key, else all have the same.
    What makes passes faster but may wait (recording a GPU's graphs) is done at once, or in the loop's idle moments.
    `spare_folder`: for what is compiled, where the home folder cannot be written."""
    if spare_folder is not None:
        keep_in(spare_folder)
    return assemble(load(config, progress), config, clock, limits_of, progress, in_idle_moments)


def load(config: EngineConfig, progress: bool = False) -> Loaded:
    """The model: files, tokenizer and weights."""
    device = pick_device(config.device)
    check_memory(config, device)
    if config.threads:
        torch.set_num_threads(config.threads)
    elif device == "cpu":
        threads = choose_threads(config.cpu_kernels)
        log.info("computing with %d threads", threads)
    if config.quantization != "none" and device != "cpu":
        raise BadConfig(f"quantization {config.quantization} is for CPUs; leave it out on a GPU, or use --device cpu")
    files = find_model(config.model)
    spec = spec_from_config(files.config)
    tokenizer = load_tokenizer(files, _template(config))
    if tokenizer is not None:
        check_vocabulary(tokenizer, spec.vocab_size)
    dtype = pick_dtype(config.dtype, spec, device)
    model = load_model(config, files, spec, dtype, device, progress)
    return Loaded(files, spec, dtype, device, model, tokenizer)


def assemble(
    loaded: Loaded,
    config: EngineConfig,
    clock: Clock | None = None,
    limits_of: LimitsOf | None = None,
    progress: bool = False,
    in_idle_moments: bool = False,
) -> Built:
    """An engine over a loaded model."""
    spec, dtype, device = loaded.spec, loaded.dtype, loaded.device
    config = config.settled(device)
    check_memory(config, device)
    if device == "cuda":
        take_memory(loaded, config, progress)
    blocks = kv_blocks(config, spec, dtype, device)
    limits = make_limits(config, spec, blocks * config.block_size)
    host = host_blocks(config, spec, dtype, blocks)
    store = KVStore(spec, blocks, config.block_size, dtype, device, host)  # refuses what does not fit
    scheduler = make_scheduler(config, limits, blocks, host, limits_of)
    runner = Runner(loaded.model, store, scheduler.rows.count, limits.max_model_len, device)
    # a pass too many for each answer costs a CPU more than it gains: planning takes no time beside computing there
    depth = config.depth or (2 if device == "cuda" else 1)
    executor, more = make_executor(runner, config)
    loop = EngineLoop(Engine(scheduler), executor, clock or WallClock(), depth=depth, check=config.check)
    if in_idle_moments:
        loop.spare = more
    else:
        for _ in tqdm(more, desc="graphs", unit="graph", disable=not progress, leave=False):
            pass
    return Built(
        config=config,
        files=loaded.files,
        spec=spec,
        dtype=dtype,
        device=device,
        loop=loop,
        tokenizer=loaded.tokenizer,
        eos=frozenset(eos_ids(loaded.files)),
        defaults=dict(sampling_defaults(loaded.files)),
        limits=limits,
        kv_blocks=blocks,
    )


def make_executor(runner: Runner, config: EngineConfig) -> tuple[Executor, Iterator[object]]:
    """Passes on a thread of their own; on a GPU, which needs none, on a stream. And what it may do beforehand."""
    if runner.kv.data.device.type == "cuda":
        from shoal.runner.cuda import CudaExecutor  # loads triton

        executor = CudaExecutor(runner, config.pass_tokens)
        if config.layout == "padded":  # its passes are no graphs
            return executor, iter(())
        return executor, executor.recordings(config.slots)
    release_threads(config.cpu_kernels)  # those that loaded the weights
    return ThreadedExecutor(runner), iter(())


def take_memory(loaded: Loaded, config: EngineConfig, progress: bool) -> None:
    """Compute the largest passes once, so that what is free afterwards is really free for the KV cache."""
    from shoal.runner.cuda import rehearse

    tokens = config.pass_tokens
    if config.prefill != "chunked" or config.batching != "continuous":  # a prompt is taken whole
        tokens = max(tokens, config.max_model_len or loaded.spec.max_position)
    log.info("rehearsing passes of %d tokens and %d requests", tokens, config.slots)
    rehearse(loaded.model, loaded.dtype, config.block_size, tokens, config.slots, progress)


def pick_device(name: str) -> str:
    """auto is the GPU where there is one that can be used."""
    usable = torch.cuda.is_available()
    device = pick({"auto": "cuda" if usable else "cpu", "cpu": "cpu", "cuda": "cuda"}, name, "device")
    if device == "cuda" and not usable:
        raise BadConfig("device cuda: no usable NVIDIA GPU was found; check nvidia-smi, or use --device cpu")
    return device


def _template(config: EngineConfig) -> str | None:
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text()
    except OSError as error:
        raise BadConfig(f"cannot read the chat template {config.chat_template}: {error.strerror}") from error


def load_model(
    config: EngineConfig, files: ModelFiles, spec: ModelSpec, dtype: torch.dtype, device: str, progress: bool
) -> Model:
    """Weights from the files, or random ones."""
    if config.load_format == "dummy":
        params = dummy_weights(spec, dtype, device, seed=config.seed or 0)
    else:
        reader = ArrayReader(GgufFile(files.path)) if files.kind == "gguf" else SafetensorsReader(files.path)
        params = load_weights(reader, spec, dtype, device, progress=progress)
    if config.quantization == "int8":
        params.convert(to_int8)
    ops = kernels.pick(device, config.cpu_kernels)
    params.convert(ops.prepare)
    return make_model(spec, params, ops)


def free_memory(device: str = "cpu") -> int:
    """Bytes that can be taken without pushing others out."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # no /proc: half of what there is


def whole_memory(device: str = "cpu") -> int:
    """Bytes there are at all, free or not."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(config: EngineConfig, device: str) -> None:
    """Refuse a size that can never be filled. More than is free now may be asked for: a CPU's pages are taken when they
    are first written."""
    sizes = [("--kv-memory", config.kv_memory, device), ("--host-kv-memory", config.host_kv_memory, "cpu")]
    for flag, asked, where in sizes:
        if asked is not None and asked > (whole := whole_memory(where)):
            owner = "the GPU" if where == "cuda" else "this machine"
            raise BadConfig(
                f"{flag} asks for {asked / 2**30:.1f} GiB, which do not fit: {owner} has {whole / 2**30:.1f} GiB "
                f"in all; lower {flag}"
            )


def kv_blocks(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: str = "cpu") -> int:
    """How many blocks fit; no more than all slots could ever fill at once."""
    block_bytes = bytes_per_block(spec, config.block_size, dtype)
    longest = config.max_model_len or spec.max_position
    useful = config.slots * -(-longest // config.block_size)
    if config.kv_memory is not None:
        blocks = config.kv_memory // block_bytes
    else:
        free = free_memory(device)
        room = int(free * (config.kv_share or 0.5))
        if device == "cuda":  # recorded graphs need memory of their own
            room = min(int(free * (config.kv_share or 0.9)), free - GRAPHS_BYTES)
        blocks = min(useful, max(room, 0) // block_bytes)
    if blocks < 1:
        raise BadConfig(
            f"one KV block of {config.block_size} tokens takes {block_bytes:,} bytes and does not fit; "
            f"raise --kv-memory or lower --block-size"
        )
    return blocks


def host_blocks(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, blocks: int) -> int:
    """How many blocks host memory keeps: as told, or as many as the device for a policy that needs some."""
    block_bytes = bytes_per_block(spec, config.block_size, dtype)
    if config.host_kv_memory is not None:
        return config.host_kv_memory // block_bytes
    if config.when_short in ("swap", "auto"):
        return min(blocks, max(1, MOST_HOST_BYTES // block_bytes))
    return 0


def make_limits(config: EngineConfig, spec: ModelSpec, kv_tokens: int) -> Limits:
    """The context: as asked, at most the model's own, at most what the KV cache holds."""
    asked = config.max_model_len
    if asked is not None and asked > spec.max_position:
        raise BadConfig(f"max_model_len {asked} is more than the model's own {spec.max_position}; lower it")
    longest = asked or spec.max_position
    if kv_tokens < longest:
        if asked is not None:
            raise BadConfig(
                f"the KV cache holds {kv_tokens} tokens, fewer than max_model_len {asked}; "
                f"raise --kv-memory or lower --max-model-len"
            )
        log.info("the KV cache holds %d tokens, so sequences end there and not at %d", kv_tokens, longest)
        longest = kv_tokens
    return Limits(longest, config.slots, config.pass_tokens, spec.vocab_size)


def make_batching(config: EngineConfig) -> Batching:
    if config.batching == "static":
        return Static(config.group_size)
    if config.batching == "dynamic":
        return Dynamic(config.group_size, config.window_ms / 1000)
    return pick(BATCHING, config.batching, "batching")()


def make_memory(config: EngineConfig) -> Memory:
    if config.memory == "ondemand":
        return OnDemand(config.watermark)
    if config.memory == "predict":
        return Predict(config.quantile)
    return pick(MEMORY, config.memory, "memory")()


def default_limits(config: EngineConfig) -> TenantLimits:
    """Of keys that have none of their own."""
    return TenantLimits(config.key_max_concurrent, config.key_tokens_per_minute)


def make_rules(config: EngineConfig, limits_of: LimitsOf | None = None) -> Rules:
    """Every key has the same limits, unless somebody knows better."""
    if limits_of is None:
        limits = default_limits(config)
        limits_of = no_limits if limits == TenantLimits() else lambda tenant: limits
    return Rules(config.max_queue, config.max_wait, limits_of, config.max_preemptions)


def make_order(config: EngineConfig, tiers: Tiers, steps: StepModel) -> Order:
    if config.order == "slo":
        return Slo(tiers, steps, config.pass_tokens)
    if config.order == "priority":
        return Priority(config.priority_age)
    if config.order == "sjf":
        return Sjf(config.sjf_age)
    return pick(ORDER, config.order, "order")()


def make_preempt(config: EngineConfig, steps: StepModel, copies: CopyTimes) -> Preempt:
    if config.when_short == "auto":
        return Auto(steps, copies, config.pass_tokens)
    return pick(PREEMPT, config.when_short, "when_short")()


def make_scheduler(
    config: EngineConfig, limits: Limits, blocks: int, host: int = 0, limits_of: LimitsOf | None = None
) -> Scheduler:
    """The scheduler alone: no torch, so the simulator can have it too."""
    tiers, steps, copies = config.read_tiers(), StepModel(), CopyTimes()
    policies = Policies(
        batching=make_batching(config),
        layout=pick(LAYOUT, config.layout, "layout")(),
        prefill=pick(PREFILL, config.prefill, "prefill")(config.chunk_tokens),
        memory=make_memory(config),
        order=make_order(config, tiers, steps),
        preempt=make_preempt(config, steps, copies),
        budget=Promise(steps) if config.budget == "promise" else Fixed(),
        lanes=Lanes(config.lane_tokens, config.long_share, tiers),
        headroom=Headroom(config.headroom, config.headroom_tokens, len(tiers)),
        tiers=tiers,
        steps=steps,
        copies=copies,
    )
    kv = KVManager(blocks, config.block_size, config.prefix_caching, host)
    return Scheduler(limits, kv, policies, make_rules(config, limits_of))


def need_tokenizer(built: Built) -> Tokenizer:
    """The tokenizer, where text is to be read or written."""
    if built.tokenizer is None:
        raise ModelError(
            f"{built.files.name} has no tokenizer (tokenizer.json); give token ids as prompts, or add that file"
        )
    return built.tokenizer
