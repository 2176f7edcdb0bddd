"""Wiring: a config in, working objects out. The only module that imports all rooms of the engine.

config ─► files ─► spec ─► weights ─► model ─► runner ─► executor ─┐
                      └──► KV size ─► scheduler ─► engine ─────────┴─► loop
"""

import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from shoal.build_draft import DRAFT_PASS_TOKENS, NO_DRAFT, DraftMemory, find_draft, load_draft, make_draft
from shoal.build_ranks import AnyRanks, check_ranks, kv_over_ranks, share_threads, start_ranks
from shoal.build_types import as_stored, check_kernels, fitting_fp8, kept_format, kv_dtype, pick_ops, quantize_rest
from shoal.config.engine import EngineConfig
from shoal.core.clock import Clock, WallClock
from shoal.core.job import EngineInfo
from shoal.core.names import pick
from shoal.core.ports import Executor
from shoal.disagg.links import KVLinks
from shoal.engine.loop import EngineLoop
from shoal.errors import BadConfig, ModelError
from shoal.files.gguf import GgufFile
from shoal.files.source import ModelFiles, eos_ids, find_model, sampling_defaults
from shoal.kernels.cpu import keep_in
from shoal.kernels.fp8 import FP8
from shoal.machine.memory import available_bytes, memory_owner, total_bytes
from shoal.models import Model, make_model
from shoal.models.formats import checkpoint_format
from shoal.models.shard import WHOLE, Shard
from shoal.models.spec import ModelSpec, spec_from_config
from shoal.runner.graphs import Recordings
from shoal.runner.kvstore import KVStore, bytes_per_block
from shoal.runner.loader import (
    ArrayReader,
    SafetensorsReader,
    dummy_weights,
    load_weights,
    pick_dtype,
    untied_if_both,
)
from shoal.runner.parallel import over_ranks
from shoal.runner.quantized import opened
from shoal.runner.runner import Runner
from shoal.runner.threaded import ThreadedExecutor
from shoal.runner.threads import ThreadChoice, ThreadFollower, begin_thread, choose_threads, release_threads, staying_on
from shoal.runner.verify import CoinToss
from shoal.sched.admission import Limits
from shoal.sched.make import make_scheduler
from shoal.spec.make import make_drafter
from shoal.text.template import read_template
from shoal.text.tokenizer import Tokenizer, check_vocabulary, load_tokenizer

log = logging.getLogger(__name__)
OnTokenizer = Callable[[ModelFiles, Tokenizer], None]
MOST_HOST_BYTES = 4 * 2**30  # of host memory for KV blocks, by default
SHORT_CONTEXT = 1024  # tokens: a KV cache that holds fewer is worth a warning
GRAPHS_BYTES = 2**30  # of GPU memory kept free for recorded graphs


@dataclass(frozen=True)
class Loaded:
    """A model in memory. Engines of any settings can be built on it."""

    files: ModelFiles
    spec: ModelSpec
    dtype: torch.dtype
    device: str
    model: Model
    tokenizer: Tokenizer | None
    threads: ThreadChoice
    ranks: AnyRanks
    draft: Model | None = None  # the draft model, of the same type and device


@dataclass(frozen=True)
class Built:
    """A loop that is ready to run, and what its users need to know of the model."""

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
    ranks: AnyRanks

    def info(self, epoch: int = 0) -> EngineInfo:
        return EngineInfo(
            epoch,
            self.limits.max_model_len,
            self.limits.vocab_size,
            self.kv_blocks * self.config.block_size,
            str(self.dtype).removeprefix("torch."),
            self.device,
            self.config.block_size if self.config.prefix_caching else 0,
        )


def build(
    config: EngineConfig,
    clock: Clock | None = None,
    progress: bool = False,
    in_idle_moments: bool = False,
    spare_folder: Path | None = None,
    on_tokenizer: OnTokenizer | None = None,
    links: KVLinks | None = None,
) -> Built:
    """Everything that serves one model in this process.

    `in_idle_moments`: record a GPU's graphs while the loop is idle, not now. `spare_folder`: for compiled kernels, if
    the home folder is read-only. `on_tokenizer`: told of the tokenizer before the weights are loaded. `links`: to
    engines of the other role.
    """
    check_roles(config, links)
    if spare_folder is not None:
        keep_in(spare_folder)
    loaded = load(config, progress, on_tokenizer)
    try:
        return assemble(loaded, config, clock, progress, in_idle_moments, owns_ranks=True, links=links)
    except BaseException:
        loaded.ranks.close()
        raise


def load(config: EngineConfig, progress: bool = False, on_tokenizer: OnTokenizer | None = None) -> Loaded:
    """The model with its files, tokenizer and weights."""
    device = pick_device(config.device)
    check_memory(config, device)
    check_kernels(config, device)
    files = find_model(config.model)
    spec, config = spec_from_config(files.config), as_stored(config, checkpoint_format(files.config), device)
    in_messages = config.special_tokens_in_messages == "tokens"
    tokenizer = load_tokenizer(files, read_template(config.chat_template), in_messages)
    if tokenizer is not None:
        check_vocabulary(tokenizer, spec.vocab_size)
        if on_tokenizer is not None:
            on_tokenizer(files, tokenizer)
    source = find_draft(config, files, spec, tokenizer)
    dtype = fitting_fp8(config, pick_dtype(config.dtype, spec, device), device)
    threads = pick_threads(config, spec, dtype, device)
    check_ranks(config, spec, device, threads)
    kind, gigabytes = str(dtype).removeprefix("torch."), spec.parameters * dtype.itemsize / 1e9
    log.info("loading %s: %.2f GB of %s weights, on %s", files.name, gigabytes, kind, device)
    ranks, shard, connect = start_ranks(config, files, dtype, device, threads)
    try:
        with staying_on(threads.cpus):  # so that the weights are in the memory of that socket
            load_one = partial(load_model, dtype=dtype, device=device, progress=progress)
            model = load_one(config, files, spec, shard=shard)
            draft = None if source is None else load_draft(source, config, model, load_one)
        connect()
    except BaseException:
        ranks.close()
        raise
    whole = replace(spec, tie_embeddings=model.spec.tie_embeddings)  # as the files are, whatever the config says
    return Loaded(files, whole, dtype, device, model, tokenizer, threads, ranks, draft)


def pick_threads(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: str) -> ThreadChoice:
    """As configured, else, on a CPU, as many as the machine has for a model of this size."""
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.threads or device != "cpu":
        return ThreadChoice(torch.get_num_threads())
    choice = choose_threads(config.cpu_kernels, 2 * spec.parameters * dtype.itemsize)  # the weights, and as much for KV
    where = f", on CPUs {min(choice.cpus)} to {max(choice.cpus)}" if choice.cpus else ""
    choice = share_threads(choice, config)
    log.info("computing with %d threads%s", choice.threads, where)
    return choice


def assemble(
    loaded: Loaded,
    config: EngineConfig,
    clock: Clock | None = None,
    progress: bool = False,
    in_idle_moments: bool = False,
    owns_ranks: bool = False,
    links: KVLinks | None = None,
) -> Built:
    """An engine over a loaded model; `owns_ranks`: closing it ends the model's other ranks, too."""
    spec, dtype, device, ranks = loaded.spec, loaded.dtype, loaded.device, loaded.ranks
    config = config.settled(device)
    check_memory(config, device)
    check_roles(config, links)
    draft = loaded.draft if config.speculation.model else None
    if config.speculation.model and draft is None:
        raise BadConfig("speculate=draft, but the model was loaded without a draft model; load it with the same config")
    if device == "cuda":
        take_memory(loaded, config, progress)
    blocks = blocks_of_ranks(config, loaded, DraftMemory.of(draft, config, dtype))
    limits = make_limits(config, spec, blocks * config.block_size)
    host, store = make_store(loaded, config, blocks, links or KVLinks())  # raises if it does not fit
    drafter = make_drafter(config.speculation) if config.speculation.on else None
    worker = None if device == "cuda" else make_worker(loaded.threads)
    synthetic = config.speculation.synthetic
    rule = CoinToss(synthetic) if synthetic is not None else None
    runner = Runner(loaded.model, store, limits.rows, limits.max_model_len, device, rule, most_drafts(config))
    made = None if draft is None else make_draft(draft, config, limits, blocks, dtype, device, worker, runner)
    model = None if made is None else made.drafter
    scheduler = make_scheduler(config, limits, blocks, host, drafter, model, spill_cold=store.outbox is None)
    # with depth 2 each answer costs one pass too many; on a CPU that is more than planning ahead gains
    depth = config.depth or (2 if device == "cuda" else 1)
    assemble_ranks(loaded, config, store, host, runner)
    executor, more = make_executor(runner, config, loaded.threads, worker)
    executor = over_ranks(executor, ranks, owns_ranks)
    beside = [] if made is None else [made.executor]
    loop = EngineLoop(scheduler, executor, clock or WallClock(), depth, config.check, beside)
    learn = scheduler.policies.drafts.rehearsed
    graphs = rehearsing(more, learn)
    if made is not None:
        graphs = chain(graphs, rehearsing(made.recordings, partial(learn, of_draft=True)))
    if in_idle_moments:
        loop.spare = graphs
    else:
        for _ in tqdm(graphs, desc="graphs", unit="step", disable=not progress, leave=False):
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
        ranks=ranks,
    )


def check_roles(config: EngineConfig, links: KVLinks | None) -> None:
    """Raise BadConfig if a single engine is to be one of two."""
    if config.prefill == "disaggregated" and (links is None or not links.role):
        raise BadConfig(
            "prefill=disaggregated needs engines of two roles: use shoal serve, or shoal compare --presets splitwise; "
            "for one engine choose prefill=chunked"
        )


def make_store(loaded: Loaded, config: EngineConfig, blocks: int, links: KVLinks) -> tuple[int, KVStore]:
    """The blocks in host memory, which may be an outbox for other engines; and the memory of all blocks."""
    kept, spec = kv_dtype(config, loaded.dtype), loaded.model.spec
    host = host_blocks(config, kv_over_ranks(loaded.spec, loaded.ranks.size), kept, blocks, links.has_outbox)
    outbox = links.outbox(host, bytes_per_block(spec, config.block_size, kept)) if host else None
    return host, KVStore(spec, blocks, config.block_size, kept, loaded.device, host, outbox, links.peers)


def make_worker(threads: ThreadChoice) -> ThreadPoolExecutor:
    """The thread that computes all passes on a CPU."""
    release_threads()  # the threads that loaded the weights
    start = partial(begin_thread, threads)
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-runner", initializer=start)


def rehearsing(recordings: Recordings, learn: Callable[[int, float], None]) -> Iterator[None]:
    """Record graphs, and tell the scheduler how long passes of their sizes take."""
    for recorded in recordings:
        if recorded is not None:
            learn(*recorded)
        yield


def make_executor(
    runner: Runner, config: EngineConfig, threads: ThreadChoice, worker: ThreadPoolExecutor | None
) -> tuple[Executor, Recordings]:
    """The executor (a thread on a CPU, a stream on a GPU), and an iterator that records its graphs in small steps: of
    each, the positions of its passes and the seconds that they take."""
    if runner.kv.data.device.type == "cuda":
        from shoal.runner.cuda import CudaExecutor  # loads triton

        if runner.model.shard is not WHOLE:  # other ranks could not record graphs along before they are needed
            from shoal.runner.cuda_parallel import ParallelCudaExecutor

            return ParallelCudaExecutor(runner, config.pass_tokens, most_drafts(config)), iter(())
        executor = CudaExecutor(runner, config.pass_tokens, most_drafts(config))
        if config.layout == "padded":  # its passes do not run as graphs
            return executor, iter(())
        return executor, executor.recordings(config.slots)
    return ThreadedExecutor(runner, before_pass=ThreadFollower(threads), worker=worker), iter(())


def take_memory(loaded: Loaded, config: EngineConfig, progress: bool) -> None:
    """Compute the largest passes once: memory that is free afterwards is free for the KV cache."""
    from shoal.runner.cuda import rehearse

    tokens = config.pass_tokens
    if config.prefill not in ("chunked", "disaggregated") or config.batching != "continuous":  # prompts are not chunked
        tokens = max(tokens, config.max_model_len or loaded.spec.max_position)
    log.info("rehearsing passes of %d tokens and %d requests", tokens, config.slots)
    kept = kv_dtype(config, loaded.dtype)
    if loaded.model.shard is not WHOLE:
        from shoal.runner.cuda_parallel import rehearse_together

        sizes = {"block_size": config.block_size, "tokens": tokens, "lines": config.slots}
        with loaded.ranks.doing("rehearse", **sizes, most_drafts=most_drafts(config)):
            rehearse_together(loaded.model, kept, **sizes, most_drafts=most_drafts(config))
        return
    rehearse(loaded.model, kept, config.block_size, tokens, config.slots, progress, most_drafts(config))
    if config.speculation.model and loaded.draft is not None:
        tokens = DRAFT_PASS_TOKENS["cuda"]
        rehearse(loaded.draft, loaded.dtype, config.block_size, tokens, config.slots, progress)


def blocks_of_ranks(config: EngineConfig, loaded: Loaded, draft: DraftMemory) -> int:
    """KV blocks on every rank. On CPUs, and where the memory is given, it is that of all ranks together; on GPUs the
    one with the least memory decides."""
    ranks, spec, device, kept = loaded.ranks, loaded.spec, loaded.device, kv_dtype(config, loaded.dtype)
    if device == "cpu" or config.kv_memory is not None:
        return kv_blocks(config, kv_over_ranks(spec, ranks.size), kept, device, draft)
    own = kv_blocks(config, loaded.model.spec, kept, device, draft)
    return min([own, *(int(one["blocks"]) for one in ranks.ask("measure", config=asdict(config)))])


def assemble_ranks(loaded: Loaded, config: EngineConfig, store: KVStore, host: int, runner: Runner) -> None:
    """Have the other ranks, if any, build what this one has."""
    sizes = {"blocks": store.scratch, "host_blocks": host, "block_size": store.block_size}
    rows, context = runner.tables.blocks.shape[0], runner.tables.blocks.shape[1] * store.block_size
    more = {} if loaded.device == "cpu" else {"most_tokens": config.pass_tokens, "most_drafts": most_drafts(config)}
    loaded.ranks.ask("assemble", **sizes, rows=rows, max_model_len=context, **more)


def most_drafts(config: EngineConfig) -> int:
    """Draft tokens of one request and pass, at most."""
    return config.draft_tokens if config.speculation.on else 0


def pick_device(name: str) -> str:
    """auto: the GPU if there is a usable one."""
    usable = torch.cuda.is_available()
    device = pick({"auto": "cuda" if usable else "cpu", "cpu": "cpu", "cuda": "cuda"}, name, "device")
    if device == "cuda" and not usable:
        raise BadConfig("device cuda: no usable NVIDIA GPU was found; check nvidia-smi, or use --device cpu")
    return device


def load_model(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: str,
    progress: bool,
    shard: Shard = WHOLE,
) -> Model:
    """Weights from the files, or random ones: those that the shard holds."""
    parts = shard.size if device == "cuda" else 1  # ranks on CPUs share one memory
    if config.load_format == "dummy":
        check_size(spec.parameters // parts, dtype, device, "choose smaller sizes in config.json")
        params = dummy_weights(spec, dtype, device, seed=config.seed or 0, shard=shard)
    else:
        form = checkpoint_format(files.config)
        file = GgufFile(files.path) if files.kind == "gguf" else None
        reader = opened(SafetensorsReader(files.path) if file is None else ArrayReader(file), form)
        spec = untied_if_both(reader, spec)
        small = config.quantization in ("fp8", "int4")
        # a config that claims more than the files hold is refused for that
        held = min(spec.parameters, sum(math.prod(reader.shape(name)) for name in reader.names()))
        smaller = ", or --dtype bfloat16" if dtype.itemsize > 2 else ""
        change = f"give it more memory, or choose a smaller model{smaller}"
        check_size(held // parts, FP8 if small else dtype, device, change)
        keep = kept_format(config, reader, file, files.name, device)
        params = load_weights(reader, spec, dtype, device, progress, shard, keep)
    quantize_rest(config, params)
    ops = pick_ops(config, device)
    params.convert(ops.prepare)
    return make_model(shard.local(spec), params, ops, shard)


def free_memory(device: str = "cpu") -> int:
    """Bytes that can be allocated without swapping."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return available_bytes()


def whole_memory(device: str = "cpu") -> int:
    """Bytes in total, free or not."""
    return int(torch.cuda.mem_get_info()[1]) if device == "cuda" else total_bytes()


def owner_of_memory(device: str) -> str:
    return "the GPU" if device == "cuda" else memory_owner()


def check_size(parameters: int, dtype: torch.dtype, device: str, change: str) -> None:
    """Refuse weights that can never fit: the system would kill the process while it loads them."""
    needed, whole = parameters * dtype.itemsize, whole_memory(device)
    if needed > whole:
        raise BadConfig(
            f"the weights take {needed / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')}, and "
            f"{owner_of_memory(device)} has {whole / 2**30:.1f} GiB in total; {change}"
        )


def check_memory(config: EngineConfig, device: str) -> None:
    """Refuse a size above the total memory. More than is free now is allowed: a CPU allocates pages when they are first
    written."""
    sizes = [("--kv-memory", config.kv_memory, device), ("--host-kv-memory", config.host_kv_memory, "cpu")]
    for flag, asked, where in sizes:
        # ranks on GPUs each have a memory of their own
        ranks = config.tensor_parallel_size if where == "cuda" else 1
        if asked is not None and asked > (whole := ranks * whole_memory(where)):
            raise BadConfig(
                f"{flag} asks for {asked / 2**30:.1f} GiB, which do not fit: {owner_of_memory(where)} has "
                f"{whole / 2**30:.1f} GiB in total; lower {flag}"
            )


def kv_blocks(
    config: EngineConfig,
    spec: ModelSpec,
    kept: torch.dtype,
    device: str = "cpu",
    draft: DraftMemory = NO_DRAFT,
) -> int:
    """How many blocks of this type fit, each with the draft model's KV beside it; at most as many as all slots can fill
    at once."""
    block_bytes = bytes_per_block(spec, config.block_size, kept) + draft.block_bytes
    longest = config.max_model_len or spec.max_position
    useful = config.slots * -(-longest // config.block_size)
    if config.kv_memory is not None:
        blocks = max(config.kv_memory - draft.spare_bytes, 0) // block_bytes
        change = "raise --kv-memory or lower --block-size"
    else:
        free = free_memory(device)
        usable = int(free * (config.kv_share or 0.5))
        if device == "cuda":
            usable = min(int(free * (config.kv_share or 0.9)), free - GRAPHS_BYTES)
        blocks = min(useful, max(usable - draft.spare_bytes, 0) // block_bytes)
        change = (
            f"{owner_of_memory(device)} has {free / 2**20:,.0f} MiB left after the weights: give it more memory, "
            "choose a smaller model, or set --kv-memory"
        )
    if blocks < 1:
        what = f"one KV block of {config.block_size} tokens takes {block_bytes:,} bytes and does not fit"
        raise BadConfig(f"{what}; {change}")
    return blocks


def host_blocks(config: EngineConfig, spec: ModelSpec, kept: torch.dtype, blocks: int, for_peers: bool = False) -> int:
    """How many blocks host memory holds: as configured, else as many as the device if the policy swaps or other engines
    read them, but not more than a quarter of the memory that is free."""
    block_bytes = bytes_per_block(spec, config.block_size, kept)
    if config.host_kv_memory is not None:
        return config.host_kv_memory // block_bytes
    if for_peers or config.when_short in ("swap", "auto"):
        return min(blocks, max(1, min(MOST_HOST_BYTES, available_bytes() // 4) // block_bytes))
    return 0


def make_limits(config: EngineConfig, spec: ModelSpec, kv_tokens: int) -> Limits:
    """The longest sequence: as configured, at most the model's own limit and the size of the KV cache."""
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
        short = kv_tokens < SHORT_CONTEXT
        log.log(
            logging.WARNING if short else logging.INFO,
            "the KV cache holds %d tokens, so sequences end there and not at %d%s",
            kv_tokens,
            longest,
            ": memory is short; give it more, or choose a smaller model" if short else "",
        )
        longest = kv_tokens
    return Limits(longest, config.slots, config.pass_tokens, spec.vocab_size)


def need_tokenizer(built: Built) -> Tokenizer:
    """The tokenizer; raises ModelError if the model has none."""
    if built.tokenizer is None:
        raise ModelError(
            f"{built.files.name} has no tokenizer (tokenizer.json); give token ids as prompts, or add that file"
        )
    return built.tokenizer
