"""Make: a scheduler from a config. No torch, so the simulator and the benchmarks can use it alone."""

from shoal.config.engine import EngineConfig
from shoal.core.drafts import Drafter, ModelDrafter
from shoal.core.names import pick
from shoal.errors import EngineError
from shoal.kv.manager import KVManager
from shoal.sched.admission import Limits, Rules
from shoal.sched.batching import BATCHING
from shoal.sched.budget import BUDGET
from shoal.sched.drafts import DraftPolicy, NoDrafts
from shoal.sched.lanes import Headroom, Lanes
from shoal.sched.layout import LAYOUT
from shoal.sched.memory import MEMORY
from shoal.sched.modeldrafts import ModelDrafts
from shoal.sched.ordering import ORDER
from shoal.sched.policies import Policies
from shoal.sched.preempt import PREEMPT
from shoal.sched.prefill import PREFILL
from shoal.sched.scheduler import Scheduler
from shoal.sched.setup import Setup
from shoal.sched.speculation import Speculation


def make_policies(setup: Setup, drafts: DraftPolicy | None = None) -> Policies:
    """One policy per axis, as the config names them."""
    config = setup.config
    return Policies(
        batching=pick(BATCHING, config.batching, "batching").make(setup),
        layout=pick(LAYOUT, config.layout, "layout").make(setup),
        prefill=pick(PREFILL, config.prefill, "prefill").make(setup),
        memory=pick(MEMORY, config.memory, "memory").make(setup),
        order=pick(ORDER, config.order, "order").make(setup),
        preempt=pick(PREEMPT, config.when_short, "when_short").make(setup),
        budget=pick(BUDGET, config.budget, "budget").make(setup),
        lanes=Lanes.make(setup),
        headroom=Headroom.make(setup),
        tiers=setup.tiers,
        steps=setup.steps,
        copies=setup.copies,
        drafts=drafts or NoDrafts(),
    )


def make_scheduler(
    config: EngineConfig,
    limits: Limits,
    blocks: int,
    host: int = 0,
    drafter: Drafter | None = None,
    model: ModelDrafter | None = None,
    spill_cold: bool = True,
) -> Scheduler:
    """A scheduler over so many KV blocks on the device and in host memory. drafter: made by the caller, since this room
    knows none; it is needed where the config speculates. model: a draft model, where it names one. spill_cold:
    whether host memory also keeps cached blocks of no request."""
    if config.speculation.on and drafter is None:
        raise EngineError(f"speculate {config.speculate} needs a drafter, and none was made")
    if config.speculation.model and model is None:
        raise EngineError(f"speculate {config.speculate} needs a draft model, and none was made")
    rules = Rules(config.max_queue, config.max_wait, config.max_preemptions)
    kv = KVManager(blocks, config.block_size, config.prefix_caching, host, spill_cold)
    setup = Setup(config, config.read_tiers())
    drafts = None
    if drafter is not None and config.speculation.on:
        models = None if model is None else ModelDrafts(model)
        drafts = Speculation(drafter, setup.steps, limits.vocab_size, config.draft_tokens, models)
    return Scheduler(limits, kv, make_policies(setup, drafts), rules)
