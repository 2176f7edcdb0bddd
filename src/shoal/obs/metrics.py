"""Prometheus metrics: of an engine, from its events, and of a front, from its answers.

EngineMetrics runs in the engine's process between two passes, so it counts in bulk: the tokens of a pass share one
commit time, and most of their requests got their previous token at one time, too. Knows events; knows no scheduler, no
clock, no process and no HTTP beyond the names of the routes.
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.core.events import Finished, PassEvents
from shoal.core.report import EngineStatus
from shoal.core.request import Reason
from shoal.errors import BadParameter, BadRequest, LedgerDown, RateLimited, Rejected
from shoal.obs.utilisation import Utilisation

OTHER = "other"

# from a small model on a GPU (a millisecond) to a long prompt on a CPU (a minute)
WAIT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
ANSWER_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
# finer where readers notice the difference: 5 to 200 ms between tokens
GAP_S = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2,
    5, 10,
)  # fmt: skip
REQUESTS = tuple(2**power for power in range(11))  # 1 … 1,024
TOKENS = tuple(2**power for power in range(18))  # 1 … 131,072
ROW_TOKENS = tuple(range(1, 17))
SHARE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1)

GAUGES = {
    "shoal_requests_running": "Requests that hold a row of the batch",
    "shoal_requests_waiting": "Requests in the queue, preempted ones included",
    "shoal_kv_blocks_held": "KV blocks held by requests",
    "shoal_kv_blocks_cached": "KV blocks not held by any request, kept for prefix hits until they are needed",
    "shoal_kv_blocks_capacity": "KV blocks in total",
    "shoal_kv_use_ratio": "Share of the KV blocks held by requests",
    "shoal_mfu_ratio": "FLOP per second of passes lately, over the rate measured on the device; NaN: not known yet",
    "shoal_mbu_ratio": "Bytes of weights and KV per second of passes lately, over the device's measured rate",
    "shoal_useful_work_ratio": "Share of computed work lately that requests needed (see shoal_useful_flop_total)",
    "shoal_device_flop_rate": "FLOP per second of matrix products, as measured on the device; 0: not yet",
    "shoal_device_byte_rate": "Bytes per second read from memory, as measured on the device; 0: not yet",
    "shoal_draft_saved_seconds": "Time that draft tokens saved so far, by the model of passes; below 0: they cost time",
}
COUNTERS = {
    "shoal_requests_arrived": "Requests accepted into the queue",
    "shoal_prompt_tokens": "Prompt tokens of requests, counted when they first run",
    "shoal_prefix_hit_tokens": "Prompt tokens found in the prefix cache",
    "shoal_output_tokens": "Tokens generated",
    "shoal_computed_tokens": "Positions computed for requests: prompt, output and recomputation",
    "shoal_recomputed_tokens": "Positions computed again after a preemption",
    "shoal_padded_tokens": "Padding positions computed",
    "shoal_budget_tokens": "Token budgets of all passes",
    "shoal_kv_read_positions": "KV positions that passes read",
    "shoal_flop": "FLOP of all passes, by the model's shape",
    "shoal_useful_flop": "Of these, not for padding, recomputation, rejected drafts or requests that had ended",
    "shoal_moved_bytes": "Bytes of weights and KV that all passes read and wrote, by the model's shape",
    "shoal_preemptions": "Preemptions: requests that lost their KV blocks",
    "shoal_faults": "Passes that raised an error; their requests are retried apart from the others",
    "shoal_kv_blocks_out": "KV blocks copied to host memory",
    "shoal_kv_blocks_in": "KV blocks copied back from host memory",
    "shoal_kv_blocks_arrived": "KV blocks that came from a prefill engine",
    "shoal_kv_blocks_lost": "KV blocks whose copy from a prefill engine failed, and which were computed again",
}
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "shoal_queue_seconds": ("From a request's arrival to its first admission", WAIT_S),
    "shoal_time_to_first_token_seconds": ("From a request's arrival to its first token", WAIT_S),
    "shoal_inter_token_seconds": ("From one token of a request to the next", GAP_S),
    "shoal_end_to_end_seconds": (
        "From a request's arrival to its end, for requests that ended with an answer",
        ANSWER_S,
    ),
    "shoal_step_seconds": ("Time the device took to compute a pass", GAP_S),
    "shoal_step_turnaround_seconds": ("From a pass's plan to its commit, including the passes ahead of it", GAP_S),
    "shoal_batch_requests": ("Requests in a pass", REQUESTS),
    "shoal_batch_tokens": ("Positions computed for requests in a pass", TOKENS),
    "shoal_budget_use_ratio": ("Share of its token budget that a pass used", SHARE),
    "shoal_draft_row_tokens": ("Tokens that a request got from a pass which verified draft tokens for it", ROW_TOKENS),
    "shoal_request_prompt_tokens": ("Length of a request's prompt, counted when it first runs", TOKENS),
    "shoal_request_output_tokens": ("Length of an answer", TOKENS),
}
FINISHED = "shoal_requests_finished"
REJECTED = "shoal_requests_rejected"
GAVE_WAY = "shoal_requests_gave_way"
PROPOSED = "shoal_draft_tokens_proposed"
ACCEPTED = "shoal_draft_tokens_accepted"
PROMISES = "shoal_promises"
POLICIES = "shoal_policies"
WAYS = ("recompute", "swap", "drop")
PROMISE_LABELS = ["tier", "promise", "kept"]
AXES = ("batching", "layout", "prefill", "budget", "memory", "order", "when_short", "speculate")
LABELLED = {
    GAVE_WAY: ("how", "Preemptions, by what happened to the KV blocks"),
    FINISHED: ("reason", "Requests that ended, by reason"),
    REJECTED: ("kind", "Requests rejected, by the name of the error"),
    PROPOSED: ("drafter", "Draft tokens that were verified, by drafter"),
    ACCEPTED: ("drafter", "Draft tokens that were accepted, by drafter"),
}
ANSWERED = frozenset({Reason.STOP, Reason.LENGTH, Reason.TIMEOUT})
# all kinds, so that every series exists from the start and their number is bounded
OF_FRONTS = (BadParameter.__name__, LedgerDown.__name__, RateLimited.__name__)  # because of a key's limits
KINDS = (
    *sorted(
        kind.__name__
        for base in (BadRequest, Rejected)
        for kind in base.__subclasses__()
        if kind not in (LedgerDown, RateLimited)  # the engine knows no limits of keys
    ),
    OTHER,
)

HTTP, ACTIVE, LIMITED = "shoal_http_requests", "shoal_http_active_requests", "shoal_limit_rejections"
FRONT = {
    HTTP: "HTTP requests answered, by route and status",
    LIMITED: "Requests refused because of their key's limits, by the name of the error",
    ACTIVE: "Unfinished generation requests of this front",
    "shoal_engine_up": "1 while the engine answers, else 0",
    "shoal_engine_restarts": "Restarts of the engine",
}
ROUTES = frozenset({
    "/", "/docs", "/openapi.json", "/static", "/health", "/version", "/metrics", "/tokenize", "/detokenize",
    "/v1/models", "/v1/models/{model}", "/v1/completions", "/v1/chat/completions", "/debug/requests", "/debug/passes",
    "/admin/restart",
})  # fmt: skip
FOLDERS = {"/static/": "/static", "/v1/models/": "/v1/models/{model}"}


class Tally:
    """A histogram that takes many equal values at once.

    >>> tally = Tally("shoal_example_seconds", "An example", (0.1, 1))
    >>> tally.add(0.1, times=3)
    >>> tally.add(5.0)
    >>> tally.counts
    [3, 0, 1]
    """

    __slots__ = ("bounds", "counts", "help", "name", "total")

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self.bounds = name, help, bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: above all bounds
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self) -> Metric:
        names = [*map(str, map(float, self.bounds)), "+Inf"]
        buckets = list(zip(names, accumulate(self.counts), strict=True))
        return HistogramMetricFamily(self.name, self.help, buckets=buckets, sum_value=self.total)


class EngineMetrics(Collector):
    """Counts the events of one engine; an Observer. A request with n samples counts as n requests here."""

    def __init__(
        self,
        policies: Mapping[str, str] | None = None,
        drafters: Iterable[str] = (),
        utilisation: Utilisation | None = None,
    ) -> None:
        self.policies = dict(policies or {})  # axis → choice
        self.utilisation = utilisation or Utilisation()
        self.proposed, self.accepted = dict.fromkeys(drafters, 0), dict.fromkeys(drafters, 0)
        self.ways = dict.fromkeys(WAYS, 0)
        self.promises: Counter[tuple[str, ...]] = Counter()  # (tier, which promise, kept) → requests
        self.gauges: dict[str, float] = dict.fromkeys(GAUGES, 0)
        self.totals: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.tallies = {name: Tally(name, help, bounds) for name, (help, bounds) in HISTOGRAMS.items()}
        self.reasons = {reason.value: 0 for reason in Reason}
        self.kinds = dict.fromkeys(KINDS, 0)
        # of requests that have not ended
        self._arrived_s: dict[str, float] = {}
        self._token_s: dict[str, float] = {}  # when its last token was committed
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    @property
    def tracked(self) -> int:
        """How many entries are kept about requests: 0 when the engine is empty."""
        return len(self._arrived_s) + len(self._token_s)

    def take(self, events: PassEvents) -> None:
        """Count one record. Call it once for each, in order."""
        self._arrivals(events)
        if events.scheduled_ids:
            self._pass(events)
        self.totals["shoal_faults"] += events.faults
        self.totals["shoal_kv_blocks_out"] += events.blocks_out
        self.totals["shoal_kv_blocks_in"] += events.blocks_in
        self.totals["shoal_kv_blocks_arrived"] += events.blocks_arrived
        self.totals["shoal_kv_blocks_lost"] += events.blocks_lost
        if events.proposed:
            self._drafts(events)
        if events.owners:
            self._tokens(events)
        for finished in events.finished:
            self._end(finished, events.committed_s)
        self._gauges(events)

    def render(self) -> bytes:
        """All of it as Prometheus text."""
        return generate_latest(self._registry)

    # ---- the parts of a record ------------------------------------------------------------------------------------

    def _arrivals(self, events: PassEvents) -> None:
        self._arrived_s.update(zip(events.arrived, events.arrived_s, strict=True))
        self.totals["shoal_requests_arrived"] += len(events.arrived)
        self.totals["shoal_preemptions"] += len(events.preempted)
        for lost in events.preempted:
            self.ways[lost.how] += 1
        for refused in events.rejected:
            self.kinds[refused.kind if refused.kind in self.kinds else OTHER] += 1
            if refused.tier:
                self.promises[refused.tier, "ttft", "no"] += 1
            self._forget(refused.id)
        for admitted in events.admitted:
            if not admitted.resumed:  # a resumed request was counted before
                self.totals["shoal_prompt_tokens"] += admitted.prompt_tokens
                self.totals["shoal_prefix_hit_tokens"] += min(admitted.cached_tokens, admitted.prompt_tokens)
                self.tallies["shoal_request_prompt_tokens"].add(admitted.prompt_tokens)
                self.tallies["shoal_queue_seconds"].add(admitted.waited_s)

    def _pass(self, events: PassEvents) -> None:
        totals, tallies = self.totals, self.tallies
        totals["shoal_computed_tokens"] += events.computed_tokens
        totals["shoal_recomputed_tokens"] += events.recomputed_tokens
        totals["shoal_padded_tokens"] += events.padded_tokens
        totals["shoal_budget_tokens"] += events.budget_tokens
        totals["shoal_kv_read_positions"] += events.kv_reads
        self.utilisation.take(events)
        tallies["shoal_step_seconds"].add(events.busy_s)
        tallies["shoal_step_turnaround_seconds"].add(events.committed_s - events.planned_s)
        tallies["shoal_batch_requests"].add(len(events.scheduled_ids))
        tallies["shoal_batch_tokens"].add(events.computed_tokens)
        if events.budget_tokens:
            tallies["shoal_budget_use_ratio"].add(events.computed_tokens / events.budget_tokens)

    def _drafts(self, events: PassEvents) -> None:
        for name, tokens in events.proposed.items():
            self.proposed[name] = self.proposed.get(name, 0) + tokens
            self.accepted[name] = self.accepted.get(name, 0) + events.accepted[name]
        for tokens in events.row_tokens:
            self.tallies["shoal_draft_row_tokens"].add(tokens)
        self.gauges["shoal_draft_saved_seconds"] += events.saved_s

    def _tokens(self, events: PassEvents) -> None:
        """Hot: up to a thousand tokens per pass, so requests with the same previous token time are counted together."""
        now_s, token_s = events.committed_s, self._token_s
        gaps = self.tallies["shoal_inter_token_seconds"]
        self.totals["shoal_output_tokens"] += len(events.owners)
        token_now = dict.fromkeys(events.owners, now_s)
        together = len(events.owners) - len(token_now)
        if together:  # several tokens of one request in one record: drafts, or a static group that ends
            gaps.add(0.0, together)
        before = Counter(map(token_s.get, token_now))
        if before.pop(None, 0):
            self._first_tokens(events)
        for last_s, times in before.items():
            assert last_s is not None
            gaps.add(now_s - last_s, times)
        token_s.update(token_now)

    def _first_tokens(self, events: PassEvents) -> None:
        waits = self.tallies["shoal_time_to_first_token_seconds"]
        for owner, index in zip(events.owners, events.indexes, strict=True):
            if index == 0 and owner in self._arrived_s:  # else it got its first token from an engine that died
                waits.add(events.committed_s - self._arrived_s[owner])

    def _end(self, finished: Finished, now_s: float) -> None:
        self.reasons[finished.reason.value] += 1
        for promise, kept in (("ttft", finished.kept_ttft), ("itl", finished.kept_itl)):
            if kept is not None:
                self.promises[finished.tier, promise, "yes" if kept else "no"] += 1
        arrived_s = self._forget(finished.id)
        if finished.reason in ANSWERED:
            self.tallies["shoal_request_output_tokens"].add(finished.outputs)
            if arrived_s is not None:
                self.tallies["shoal_end_to_end_seconds"].add(now_s - arrived_s)

    def _forget(self, id: str) -> float | None:
        self._token_s.pop(id, None)
        return self._arrived_s.pop(id, None)

    def _gauges(self, events: PassEvents) -> None:
        gauges = self.gauges
        gauges["shoal_requests_running"] = events.running
        gauges["shoal_requests_waiting"] = events.waiting
        gauges["shoal_kv_blocks_held"] = events.blocks_held
        gauges["shoal_kv_blocks_cached"] = events.blocks_cached
        gauges["shoal_kv_blocks_capacity"] = events.blocks_total
        gauges["shoal_kv_use_ratio"] = events.blocks_held / events.blocks_total if events.blocks_total else 0.0

    # ---- the Prometheus collector ---------------------------------------------------------------------------------

    def _note_utilisation(self) -> None:
        use = self.utilisation
        shares = use.shares()
        for name, share in (("mfu", "mfu"), ("mbu", "mbu"), ("useful_work", "useful")):
            self.gauges[f"shoal_{name}_ratio"] = shares[share]
        if use.rates is not None:
            self.gauges["shoal_device_flop_rate"] = use.rates.flop_s
            self.gauges["shoal_device_byte_rate"] = use.rates.bytes_s
        self.totals["shoal_flop"] = round(use.flop)
        self.totals["shoal_useful_flop"] = round(use.useful_flop)
        self.totals["shoal_moved_bytes"] = round(use.moved_bytes)

    def collect(self) -> Iterator[Metric]:
        self._note_utilisation()
        for name, help in GAUGES.items():
            yield GaugeMetricFamily(name, help, value=self.gauges[name])
        for name, help in COUNTERS.items():
            yield CounterMetricFamily(name, help, value=self.totals[name])
        drafts = ((PROPOSED, self.proposed), (ACCEPTED, self.accepted))
        for name, values in ((FINISHED, self.reasons), (REJECTED, self.kinds), (GAVE_WAY, self.ways), *drafts):
            label, help = LABELLED[name]
            yield _by_label(name, help, [label], {(key,): value for key, value in values.items()})
        yield _by_label(
            PROMISES,
            "Promises to requests that ended or were rejected because of them, by whether they were kept",
            PROMISE_LABELS,
            self.promises,
        )
        if self.policies:
            chosen = GaugeMetricFamily(
                POLICIES, "The policy of each axis, as labels; always 1", labels=[*self.policies]
            )
            chosen.add_metric([*self.policies.values()], 1)
            yield chosen
        for tally in self.tallies.values():
            yield tally.family()


@dataclass(frozen=True, slots=True)
class FrontNumbers:
    """The counts of one front, in the form that is sent to another."""

    name: str
    active: int
    restarts: list[tuple[int, int]]  # number of an engine, how often it was restarted, as seen by this front
    answers: list[tuple[str, str, int]]  # route, status, how many
    refusals: list[tuple[str, int]]  # kind of error, how many


class FrontMetrics(Collector):
    """Counts the answers of one front. Knows of the engines only whether they are up and how often they were started.

    The front's name is a label. A scrape reaches one of several fronts, which shows the numbers of all: its own, and
    those it got from the others, as made by tell().
    """

    def __init__(self, name: str = "front-0") -> None:
        self.name = name
        self.answers: Counter[tuple[str, str]] = Counter()  # (route, status) → answers
        for route in ("/v1/chat/completions", "/v1/completions"):
            self.answers[route, "500"] = 0  # exists from the start, so that rate() sees the first one
        self.refusals = dict.fromkeys(OF_FRONTS, 0)
        self._up: dict[int, bool] = {}  # by engine
        self._restarts: dict[int, int] = {}  # by engine
        self._fronts: list[FrontNumbers] = []  # shown by collect()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count(self, route: str, status: int) -> None:
        """Count one answer. The route may be a request's path; a path without a route counts as "other"."""
        self.answers[route_of(route), str(status)] += 1

    def count_refusal(self, kind: str) -> None:
        """Count one request that its key's limits refused."""
        if kind in self.refusals:
            self.refusals[kind] += 1

    def numbers(self, active: int, engines: Sequence[EngineStatus]) -> FrontNumbers:
        self._note_restarts((one.number, one.starts) for one in engines)
        answers = [(route, status, times) for (route, status), times in self.answers.items()]
        restarts = sorted(self._restarts.items())
        return FrontNumbers(self.name, active, restarts, answers, list(self.refusals.items()))

    def _note_restarts(self, restarts: Iterable[tuple[int, int]]) -> None:
        """A counter never goes back, also while an engine is down."""
        for engine, times in restarts:
            self._restarts[engine] = max(self._restarts.get(engine, 0), times)

    def tell(self, active: int, engines: Sequence[EngineStatus]) -> bytes:
        """This front's numbers as JSON, for another front."""
        return json.dumps(asdict(self.numbers(active, engines))).encode()

    def render(self, active: int, engines: Sequence[EngineStatus], others: Sequence[bytes] = ()) -> bytes:
        """The numbers of all fronts as Prometheus text, to be joined with the engines' in any order."""
        own = self.numbers(active, engines)
        received = {front.name: front for front in map(read_numbers, others) if front is not None}
        self._fronts = sorted({**received, own.name: own}.values(), key=lambda front: front.name)
        for front in self._fronts:
            self._note_restarts(front.restarts)
        self._up = {one.number: one.up for one in engines}
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        answers: dict[tuple[str, ...], int] = {}
        for front in self._fronts:
            answers |= {(front.name, route, status): times for route, status, times in front.answers}
        yield _by_label(HTTP, FRONT[HTTP], ["front", "route", "status"], answers)
        refusals: dict[tuple[str, ...], int] = {}
        for front in self._fronts:
            refusals |= {(front.name, kind): times for kind, times in front.refusals}
        yield _by_label(LIMITED, FRONT[LIMITED], ["front", "kind"], refusals)
        active = GaugeMetricFamily(ACTIVE, FRONT[ACTIVE], labels=["front"])
        for front in self._fronts:
            active.add_metric([front.name], front.active)
        yield active
        labels = ["engine"] if len(self._up) > 1 else []
        up = GaugeMetricFamily("shoal_engine_up", FRONT["shoal_engine_up"], labels=labels)
        restarts = CounterMetricFamily("shoal_engine_restarts", FRONT["shoal_engine_restarts"], labels=labels)
        for engine, is_up in self._up.items():
            up.add_metric([str(engine)] if labels else [], int(is_up))
            restarts.add_metric([str(engine)] if labels else [], self._restarts.get(engine, 0))
        yield from (up, restarts)


def read_numbers(data: bytes) -> FrontNumbers | None:
    """The numbers of another front; None if they cannot be read, as from a front that died while it sent them.

    >>> read_numbers(b'{"name": "f", "active": 2, "restarts": [[0, 1]], "answers": [["/", "200", 5]], "refusals": []}')
    FrontNumbers(name='f', active=2, restarts=[(0, 1)], answers=[('/', '200', 5)], refusals=[])
    >>> read_numbers(b'{"name": "front-1", "act')
    """
    try:
        read = json.loads(data)
        answers = [(str(route), str(status), int(times)) for route, status, times in read["answers"]]
        refusals = [(str(kind), int(times)) for kind, times in read["refusals"]]
        restarts = [(int(engine), int(times)) for engine, times in read["restarts"]]
        return FrontNumbers(str(read["name"]), int(read["active"]), restarts, answers, refusals)
    except (ValueError, KeyError, TypeError):
        return None


def route_of(path: str) -> str:
    """The route of a path, as a label: there are few routes, but any number of paths.

    >>> route_of("/v1/models/some-model"), route_of("/wp-login.php")
    ('/v1/models/{model}', 'other')
    """
    if path in ROUTES:
        return path
    return next((route for folder, route in FOLDERS.items() if path.startswith(folder)), OTHER)


def policies_of(config: object) -> dict[str, str]:
    """Axis → choice, from a config that has them as attributes."""
    return {axis: str(getattr(config, axis)) for axis in AXES}


def _by_label(name: str, help: str, labels: list[str], values: Mapping[tuple[str, ...], int]) -> Metric:
    family = CounterMetricFamily(name, help, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
