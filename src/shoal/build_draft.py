"""Wiring of a draft model (`--speculate draft`): which files it comes from, its weights, its KV and its executor.

Refuses a draft model that does not fit the model before any weights are loaded. Part of the wiring, as build.py is:
knows all rooms that it connects, and no policy.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from shoal.config.engine import EngineConfig
from shoal.core.ports import Executor
from shoal.errors import BadConfig
from shoal.files.source import ModelFiles, find_model
from shoal.models import Model
from shoal.models.spec import ModelSpec, spec_from_config
from shoal.runner.graphs import Recordings
from shoal.runner.kvstore import KVStore, bytes_per_block
from shoal.runner.runner import Runner
from shoal.runner.threaded import ThreadedExecutor
from shoal.sched.admission import Limits
from shoal.spec.draft import DraftDrafter, DraftKV, spare_blocks
from shoal.text.tokenizer import Tokenizer, load_tokenizer

DRAFT_PASS_TOKENS = {"cpu": 128, "cuda": 1024}  # positions that the draft model computes at once, between two passes
# whether its tokens stay on the device until they are verified: a CPU has nothing to wait for, and a draft whose tokens
# are known is cut where it becomes unlikely
STAY_ON_DEVICE = {"cpu": False, "cuda": True}

LoadModel = Callable[[EngineConfig, ModelFiles, ModelSpec], Model]


@dataclass(frozen=True)
class DraftFiles:
    """Where the draft model's weights come from."""

    files: ModelFiles
    spec: ModelSpec  # of all its layers
    layers: int  # the first ones, which are used
    shared: bool  # its weights are the model's own


def find_draft(
    config: EngineConfig, files: ModelFiles, spec: ModelSpec, tokenizer: Tokenizer | None
) -> DraftFiles | None:
    """The draft model that the config names, if it names one; raises BadConfig if it does not fit the model."""
    if not config.speculation.model:
        return None
    own = config.draft_model is None
    found = files if own else find_model(config.draft_model)
    its = spec if own else spec_from_config(found.config)
    if its.vocab_size != spec.vocab_size:
        raise BadConfig(
            f"draft_model {found.name} has a vocabulary of {its.vocab_size:,} tokens, and {files.name} one of "
            f"{spec.vocab_size:,}: what it drafts would mean other text; choose a draft model of the same family"
        )
    if not own and tokenizer is not None:
        check_tokens(found, load_tokenizer(found), files, tokenizer)
    layers = config.draft_layers or its.layers
    shared = own and config.draft_quantization in (None, config.quantization)
    if layers > its.layers or (shared and layers == its.layers):
        raise BadConfig(f"draft_layers {layers}: {found.name} has {its.layers} layers; use fewer")
    return DraftFiles(found, its, layers, shared)


def check_tokens(found: ModelFiles, theirs: Tokenizer | None, files: ModelFiles, ours: Tokenizer) -> None:
    """Raise BadConfig unless both mean the same text by the same ids."""
    if theirs is None:
        return
    one, other = ours.backend.get_vocab(with_added_tokens=True), theirs.backend.get_vocab(with_added_tokens=True)
    differing = [token for token, number in one.items() if other.get(token, number) != number]
    if differing or len(one.keys() & other.keys()) < 0.99 * len(one):
        example = f" (such as {min(differing)!r})" if differing else ""
        raise BadConfig(
            f"draft_model {found.name} has another vocabulary than {files.name}: its tokens have other ids{example}; "
            "choose a draft model of the same family"
        )


def load_draft(draft: DraftFiles, config: EngineConfig, model: Model, load: LoadModel) -> Model:
    """The draft model: the model's own first layers, or weights of its own."""
    found = model
    if not draft.shared:
        quantization = config.draft_quantization or config.quantization
        plain = replace(
            config, quantization=quantization, speculate="off", draft_model=None, draft_layers=None,
            draft_quantization=None,
        )  # fmt: skip
        found = load(plain, draft.files, draft.spec)
    return found if draft.layers == draft.spec.layers else found.shortened(draft.layers)


@dataclass(frozen=True)
class DraftMemory:
    """What the draft model's KV takes."""

    block_bytes: int  # beside each of the model's blocks
    spare_bytes: int  # besides

    @classmethod
    def of(cls, draft: Model | None, config: EngineConfig, dtype: torch.dtype) -> "DraftMemory":
        if draft is None:
            return NO_DRAFT
        block_bytes = bytes_per_block(draft.spec, config.block_size, dtype)
        spare = spare_blocks(config.draft_tokens, config.block_size)
        return cls(block_bytes, 2 * config.slots * spare * block_bytes)


NO_DRAFT = DraftMemory(0, 0)


@dataclass(frozen=True)
class MadeDraft:
    """A draft model that is ready to be asked."""

    drafter: DraftDrafter
    executor: Executor
    recordings: Recordings  # records its graphs: of each, its positions and seconds


def make_draft(
    model: Model,
    config: EngineConfig,
    limits: Limits,
    blocks: int,
    dtype: torch.dtype,
    device: str,
    worker: ThreadPoolExecutor | None,
    drafts_for: Runner,
) -> MadeDraft:
    """Its KV and its executor, on the thread or stream of the model's own passes."""
    size, spare = config.block_size, spare_blocks(config.draft_tokens, config.block_size)
    store = KVStore(model.spec, blocks + limits.rows * spare, size, dtype, device)
    longest = limits.max_model_len + spare * size
    runner = Runner(model, store, limits.rows, longest, device, drafts_for=drafts_for.tables)
    tokens = DRAFT_PASS_TOKENS[device]
    kv = DraftKV(blocks, size, spare, min(model.spec.max_position, longest), tokens)
    if device == "cuda":
        from shoal.runner.cuda import CudaExecutor  # loads triton

        cuda = CudaExecutor(runner, tokens, in_flight=config.draft_tokens)
        return MadeDraft(DraftDrafter(cuda, kv, STAY_ON_DEVICE[device]), cuda, cuda.recordings(config.slots))
    executor = ThreadedExecutor(runner, worker=worker, shared=True)
    return MadeDraft(DraftDrafter(executor, kv, STAY_ON_DEVICE[device]), executor, iter(()))
