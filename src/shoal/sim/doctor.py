"""The doctor: what limits a server now, from its latest passes, and what a changed setting would do, by simulation.

Each check looks at one sickness and returns a finding with its evidence and settings that may cure it, or None. The
settings are tried in the simulator, on a profile and a trace made of what the server has seen; the best is kept. Owns
the thresholds and the words. Knows no URL and no clock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import BadConfig
from shoal.sim.planner import FleetSetup
from shoal.sim.profile import Profile
from shoal.sim.promises import LatencyTarget, TierPromise
from shoal.sim.seen import SeenEngine, profile_of, trace_of
from shoal.workload.traces import TraceRequest

Column = npt.NDArray[np.float64]
LEAST_PASSES = 20  # for any finding
MOST_REQUESTS = 300  # in a trial
WAITING = 0.2  # share of passes with a queue
FULL = 0.9  # of the KV blocks
HALF_FULL = 0.6  # with free places and a queue: the next request does not fit
RECOMPUTED = 0.05  # share of positions
STALL = 4.0  # a pass with a prompt takes so many times as long as one of decodes
HOST = 0.3  # share of the time between passes
PADDED = 0.2  # share of positions
AT_BUDGET = 0.3  # share of passes that use their whole budget
NO_HITS = 0.02  # share of prompt tokens found in the prefix cache
REPLICAS = "replicas"  # not a setting of an engine
NO_PROMISE = (TierPromise("", 1.0, (LatencyTarget("ttft", 99, 1e9),)),)


@dataclass(frozen=True)
class Outcome:
    """A simulated run."""

    ttft_p50_s: float
    ttft_p99_s: float
    gap_p99_s: float
    gap_most_s: float
    e2e_mean_s: float


@dataclass(frozen=True)
class Sickness:
    """One sickness."""

    name: str
    evidence: str
    advice: str
    cures: tuple[dict[str, Any], ...] = ()  # settings to try, each by itself
    cure: dict[str, Any] = field(default_factory=dict)  # the best of them
    before: Outcome | None = None
    after: Outcome | None = None


class Signs:
    """What the checks look at."""

    def __init__(self, seen: SeenEngine) -> None:
        self.seen = seen
        self.about, self.settings = seen.about, seen.settings
        self.count = seen.count
        self.places, self.budget = int(seen.about["places"]), int(seen.about["budget"])

    def column(self, name: str) -> Column:
        """Of passes; what is not known is NaN."""
        return np.array([np.nan if one is None else one for one in self.seen.passes[name]], dtype=np.float64)

    def of_requests(self, name: str) -> Column:
        return np.array(self.seen.requests[name], dtype=np.float64)

    @property
    def queued(self) -> npt.NDArray[np.bool_]:
        return self.column("waiting") > 0

    @property
    def kv_use(self) -> Column:
        return self.column("held") / np.maximum(self.column("blocks"), 1)

    @property
    def preempted_share(self) -> float:
        return float(self.column("recomputed").sum() / max(self.column("positions").sum(), 1))

    @property
    def kv_bytes(self) -> int:
        return int(self.about["kv_tokens"] * self.about["model"]["kv_token_bytes"])

    def setting(self, name: str, default: Any) -> Any:
        return self.settings.get(name, default)


def check_places(signs: Signs) -> Sickness | None:
    queued = signs.queued
    if queued.mean() < WAITING:
        return None
    full = (signs.column("rows") >= signs.places)[queued].mean()
    if full < 0.5 or np.median(signs.kv_use[queued]) > FULL:
        return None
    wanted = float((signs.column("running") + signs.column("waiting"))[queued].mean()) / signs.places
    factor = 2 ** min(3, max(1, int(np.ceil(np.log2(max(wanted, 1.01))))))
    return Sickness(
        "the queue is long because all places are taken",
        f"requests waited during {queued.mean():.0%} of the passes, and all {signs.places} places were taken in "
        f"{full:.0%} of these",
        f"raise --max-num-seqs to {factor * signs.places}; if that does not help, the load needs another replica",
        ({"max_num_seqs": factor * signs.places}, {REPLICAS: 2}),
    )


def check_memory(signs: Signs) -> Sickness | None:
    queued = signs.queued
    if queued.mean() < WAITING or signs.preempted_share >= RECOMPUTED:
        return None
    full = (signs.kv_use >= HALF_FULL)[queued].mean()
    places = (signs.column("rows") >= signs.places)[queued].mean()
    if full < 0.5 or places >= 0.5:
        return None
    return Sickness(
        "the queue is long because KV memory is full",
        f"requests waited during {queued.mean():.0%} of the passes, with free places in {1 - places:.0%} of these; "
        f"running requests held {float(np.median(signs.kv_use[queued])):.0%} of the KV blocks",
        "raise --kv-memory, or store KV in 8 bits where the device can (--kv-dtype fp8)",
        ({"kv_memory": 2 * signs.kv_bytes}, {REPLICAS: 2}),
    )


def check_thrash(signs: Signs) -> Sickness | None:
    share, preempted = signs.preempted_share, int(signs.column("preempted").sum())
    if share < RECOMPUTED or not preempted:
        return None
    fewer = max(1, int(signs.column("running").mean() * 0.6))
    return Sickness(
        "requests preempt each other",
        f"{preempted} preemptions in {signs.count} passes; {share:.0%} of the positions had been computed before",
        f"raise --kv-memory, or let fewer requests run (--max-num-seqs {fewer}), or reserve memory (--memory predict)",
        ({"kv_memory": 2 * signs.kv_bytes}, {"max_num_seqs": fewer}, {"memory": "predict"}),
    )


def check_stalls(signs: Signs) -> Sickness | None:
    busy_s, decodes, chunk = signs.column("busy_s"), signs.column("decodes"), signs.column("chunk")
    plain = (chunk == 0) & (decodes > 0)
    mixed = (chunk > 0) & (signs.column("running") > 1)
    if plain.sum() < 5 or not mixed.any():
        return None
    usual = float(np.median(busy_s[plain]))
    stalls = mixed & (busy_s > STALL * usual)
    if stalls.sum() < 3 or stalls.mean() < 0.005:
        return None
    chunked = signs.setting("prefill", "chunked") == "chunked"
    smaller = max(16, signs.budget // 4)
    how = {"max_num_batched_tokens": smaller} if chunked else {"prefill": "chunked"}
    advice = f"lower --max-num-batched-tokens to {smaller}" if chunked else "use --prefill chunked"
    return Sickness(
        "long prompts stall the other streams",
        f"a pass of decodes takes {1e3 * usual:.1f} ms; {int(stalls.sum())} passes with prompts took up to "
        f"{1e3 * busy_s[stalls].max():.0f} ms, for chunks of up to {int(chunk[stalls].max()):,} tokens",
        advice,
        (how,),
    )


def check_host(signs: Signs) -> Sickness | None:
    between_s, busy_s = signs.column("between_s"), signs.column("busy_s")
    known = ~np.isnan(between_s) & (busy_s > 0)
    if known.sum() < LEAST_PASSES:
        return None
    share = float(np.maximum(between_s - busy_s, 0)[known].sum() / between_s[known].sum())
    if share < HOST:
        return None
    depth = int(signs.about["depth"])
    mean_ms = 1e3 * float(np.maximum(between_s - busy_s, 0)[known].mean())
    return Sickness(
        "the device waits for the host",
        f"{share:.0%} of the time between two passes the device did not compute: {mean_ms:.2f} ms a pass",
        "plan the next pass while one computes: --depth 2"
        if depth == 1
        else "give the engine's process a core of its own",
        ({"depth": 2},) if depth == 1 else (),
    )


def check_small(signs: Signs) -> Sickness | None:
    positions, busy_s = signs.column("positions"), signs.column("busy_s")
    at_limit = (signs.column("chunk") > 0) & (positions >= 0.95 * signs.budget)
    if at_limit.mean() < AT_BUDGET or not at_limit.any():
        return None
    small = np.percentile(busy_s[busy_s > 0], 5) if (busy_s > 0).any() else 0.0
    if np.median(busy_s[at_limit]) > 3 * small:
        return None  # the device has enough to do: larger passes would take in proportion longer
    larger = 8 * signs.budget
    return Sickness(
        "passes are too small",
        f"{at_limit.mean():.0%} of the passes used their whole budget of {signs.budget} tokens, and take hardly longer "
        f"than the smallest ({1e3 * float(np.median(busy_s[at_limit])):.1f} and {1e3 * float(small):.1f} ms)",
        f"raise --max-num-batched-tokens to {larger}",
        ({"max_num_batched_tokens": larger}, {"max_num_batched_tokens": 4 * larger}),
    )


def check_prefixes(signs: Signs) -> Sickness | None:
    prompts, size = signs.of_requests("prompt"), signs.setting("block_size", 16)
    if len(prompts) < LEAST_PASSES or prompts.mean() < 4 * size:
        return None
    hits = float(signs.of_requests("cached").sum() / prompts.sum())
    if hits >= NO_HITS:
        return None
    evidence = f"{hits:.0%} of the prompt tokens of {len(prompts)} requests were found in the prefix cache: "
    if not signs.setting("prefix_caching", True):
        return Sickness(
            "the prefix cache never hits",
            evidence + "it is off",
            "leave out --no-prefix-caching, if prompts begin alike",
        )
    room = 1 - signs.kv_use
    if float(np.median(room)) < 0.2:
        return Sickness(
            "the prefix cache never hits",
            evidence
            + f"running requests hold {float(np.median(signs.kv_use)):.0%} of the KV blocks, so cached ones are "
            "overwritten before they are needed",
            "raise --kv-memory, or keep evicted blocks in host memory (--host-kv-memory 4GiB)",
        )
    return None  # prompts share nothing: there is nothing to cure


def check_padding(signs: Signs) -> Sickness | None:
    share = float(signs.column("padded").sum() / max(signs.column("positions").sum(), 1))
    if share < PADDED:
        return None
    return Sickness(
        "padding takes the device's time",
        f"{share:.0%} of the computed positions were padding",
        "use --layout ragged and --batching continuous",
        ({"layout": "ragged"}, {"layout": "ragged", "batching": "continuous"}),
    )


CHECKS: tuple[Callable[[Signs], Sickness | None], ...] = (
    check_thrash,
    check_memory,
    check_places,
    check_stalls,
    check_small,
    check_host,
    check_padding,
    check_prefixes,
)


def diagnose(seen: SeenEngine) -> list[Sickness]:
    """Every sickness that the latest passes show, without estimates."""
    if seen.count < LEAST_PASSES:
        raise BadConfig(f"the engine has computed {seen.count} passes; send it some load, then ask again")
    signs = Signs(seen)
    return [found for found in (check(signs) for check in CHECKS) if found is not None]


# ---- what a cure would do -------------------------------------------------------------------------------------------


class Trials:
    """Runs the server's own load through simulated engines with changed settings."""

    def __init__(self, seen: SeenEngine) -> None:
        self.seen = seen
        self.profile: Profile = profile_of(seen, "seen")
        self.trace: list[TraceRequest] = trace_of(seen)[-MOST_REQUESTS:]
        if not self.trace:
            raise BadConfig("no request has ended yet; ask again later")
        self.trace = [replace(one, at_s=one.at_s - self.trace[0].at_s) for one in self.trace]
        self.before = self.run({})

    def run(self, changes: dict[str, Any]) -> Outcome:
        """Raises BadConfig if such settings cannot be simulated."""
        changes = dict(changes)
        replicas = changes.pop(REPLICAS, 1)
        config = self.seen.config(**changes)
        most = max(one.output for one in self.trace)
        watch = FleetSetup("", self.profile, config, most, NO_PROMISE).watch(replicas, self.trace)
        return Outcome(
            watch.percentile("ttft", 50),
            watch.percentile("ttft", 99),
            watch.percentile("gap", 99),
            watch.percentile("gap", 100),
            watch.mean("e2e"),
        )

    def cured(self, finding: Sickness) -> Sickness:
        """The finding with the cure that shortens answers most, and its effect; without, if none can be simulated."""
        best: tuple[float, dict[str, Any], Outcome] | None = None
        for changes in finding.cures:
            try:
                after = self.run(changes)
            except BadConfig:
                continue
            # another replica is the last resort: it must be clearly better
            cost = score(after, self.before) * (1.25 if REPLICAS in changes else 1.0)
            if best is None or cost < best[0]:
                best = cost, changes, after
        if best is None:
            return finding
        return replace(finding, cure=best[1], before=self.before, after=best[2])


def score(after: Outcome, before: Outcome) -> float:
    """Mean of what is left of first tokens, gaps and whole answers; below 1 is better."""
    pairs = (
        (after.ttft_p99_s, before.ttft_p99_s),
        (after.gap_p99_s, before.gap_p99_s),
        (after.e2e_mean_s, before.e2e_mean_s),
    )
    return float(np.mean([new / old if old > 0 else 1.0 for new, old in pairs]))


def examine_engine(seen: SeenEngine) -> tuple[list[Sickness], str]:
    """Every sickness with the estimated effect of its cure; and why there are no estimates, if so."""
    findings = diagnose(seen)
    try:
        trials = Trials(seen)
    except BadConfig as error:
        return findings, str(error)
    return [trials.cured(finding) for finding in findings], ""
