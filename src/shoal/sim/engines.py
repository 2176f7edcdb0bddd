"""Simulated engines: a scheduler and loop as the engine's own config makes them, over the times of a profile.

Owns the sizes that come from a profile where a real engine asks its device (KV blocks, the context, passes in flight),
and refuses what a profile says nothing of. Knows no trace.
"""

from shoal.config.engine import EngineConfig
from shoal.disagg.handoff import DECODE, PREFILL
from shoal.engine.loop import EngineLoop
from shoal.errors import BadConfig
from shoal.sched.admission import Limits
from shoal.sched.make import make_scheduler
from shoal.sim.cost import Coin, Times
from shoal.sim.profile import Profile
from shoal.sim.virtual import virtual_loop
from shoal.spec.make import make_drafter

MOST_HOST_BYTES = 4 * 2**30  # of host memory for KV blocks, by default


def simulated_loop(profile: Profile, config: EngineConfig, times: Times | None = None, role: str = "") -> EngineLoop:
    """An engine of this config on the profile's device, with the profile's times or others. `role`: of two that share
    the work, where prefill is disaggregated."""
    check_config(profile, config)
    config = config.settled(profile.card.kind)
    size, longest = config.block_size, config.max_model_len or profile.model.max_model_len
    if longest > profile.model.max_model_len:
        raise BadConfig(f"max_model_len {longest} is more than the model's own {profile.model.max_model_len}; lower it")
    block_bytes = profile.model.kv_token_bytes * size
    if config.kv_memory is not None:
        blocks = config.kv_memory // block_bytes
    else:
        blocks = min(profile.kv_tokens // size, config.slots * -(-longest // size))
    if blocks < 1:
        raise BadConfig(f"one KV block of {size} tokens takes {block_bytes:,} bytes; raise --kv-memory")
    if config.max_model_len is not None and blocks * size < longest:
        raise BadConfig(f"the KV cache holds {blocks * size} tokens, fewer than max_model_len {longest}; lower it")
    limits = Limits(min(longest, blocks * size), config.slots, config.pass_tokens, profile.model.vocab_size)
    host = 0
    if config.host_kv_memory is not None:
        host = config.host_kv_memory // block_bytes
    elif config.when_short in ("swap", "auto") or role == PREFILL:  # … whose host memory is its outbox
        host = min(blocks, max(1, MOST_HOST_BYTES // block_bytes))
    chance = config.speculation.synthetic
    drafter = None if chance is None else make_drafter(config.speculation)
    host = 0 if role == DECODE else host
    scheduler = make_scheduler(config, limits, blocks, host, drafter, spill_cold=not role)
    depth, coin = config.depth or profile.depth, None if chance is None else Coin(chance)
    return virtual_loop(scheduler, times or profile.costs, depth, config.check, coin)


def check_config(profile: Profile, config: EngineConfig) -> None:
    """Refuse what this profile was not measured with."""
    if config.speculation.on and config.speculation.synthetic is None:
        raise BadConfig(
            f"a simulated prompt has no text, so --speculate {config.speculate} finds nothing in it; give the share of "
            "draft tokens that your drafter gets right: --speculate synthetic:0.7"
        )
    if config.dtype not in ("auto", profile.dtype):
        raise BadConfig(f"the profile is of {profile.dtype}, not {config.dtype}; calibrate with --dtype {config.dtype}")
    for name, default in (("quantization", "none"), ("kv_dtype", "auto"), ("tensor_parallel_size", 1)):
        if getattr(config, name) != default:
            flag = "--" + name.replace("_", "-")
            raise BadConfig(f"the profile was not measured with {flag} {getattr(config, name)}; calibrate with it")


def check_model(profile: Profile, name: str) -> None:
    """Refuse a profile of another model."""
    if name.lower() not in profile.model.name.lower() and profile.model.name.lower() not in name.lower():
        raise BadConfig(
            f"the profile {profile.name} is of {profile.model.name}, not {name}; leave out --model, or choose or "
            "calibrate a profile of that model"
        )
