"""Make: a scheduler from a config. No torch, so the simulator and the benchmarks can use it alone."""

from shoal.config.engine import EngineConfig
from shoal.core.names import pick
from shoal.kv.manager import KVManager
from shoal.sched.admission import Limits, Rules
from shoal.sched.batching import BATCHING
from shoal.sched.budget import BUDGET
from shoal.sched.lanes import Headroom, Lanes
from shoal.sched.layout import LAYOUT
from shoal.sched.memory import MEMORY
from shoal.sched.ordering import ORDER
from shoal.sched.policies import Policies
from shoal.sched.preempt import PREEMPT
from shoal.sched.prefill import PREFILL
from shoal.sched.scheduler import Scheduler
from shoal.sched.setup import Setup


def make_policies(setup: Setup) -> Policies:
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
    )


def make_scheduler(config: EngineConfig, limits: Limits, blocks: int, host: int = 0) -> Scheduler:
    """A scheduler over so many KV blocks on the device and in host memory."""
    rules = Rules(config.max_queue, config.max_wait, config.max_preemptions)
    kv = KVManager(blocks, config.block_size, config.prefix_caching, host)
    return Scheduler(limits, kv, make_policies(Setup(config, config.read_tiers())), rules)
