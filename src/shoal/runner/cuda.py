"""An Executor for NVIDIA GPUs: passes are queued on a stream of their own, and the host waits only for tokens.

    host     plan k+1, one pinned buffer ─► one copy ─┐              wait for the tokens of k, commit, plan k+2 …
    stream   … pass k │ tokens of k ─► host │ copy k+1 │ block tables │ graph of the layers │ graph of the head │ …

Block tables and last tokens of all rows live on the device; a pass is described by small tables that kernels read
there, so one graph serves any lengths. Long passes are not recorded: their launches hide behind their own work.
The head's graph takes the likeliest token or draws one; rows that ask for more than a draw go to the Sampler.
Rows that verify drafts are decodes with several positions, and their lines are drawn like any others. Which drafts are
accepted is found on the host (verify.py): such a row is not planned again before. Drafts that a draft model left on the
device come to the host with the tokens drawn. The padded layout, and passes with more lines than ever occur under load,
are computed as on any device.
Knows rows, not requests; its kernels come from Ops.pass_ops.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from shoal.core.params import SamplingParams
from shoal.core.plan import Ints, RowStart, StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.request import Logprobs
from shoal.kernels import Batch
from shoal.kernels.draw_table import COLUMNS, ROW, Filters, filters_of
from shoal.kernels.draw_table import fill as fill_draw_table
from shoal.kernels.transfer import to_device
from shoal.models import Model
from shoal.runner.draws import PassDraws, draws_of
from shoal.runner.graphs import LINES, TOKENS, VERIFIED, Graphs, Recordings, size_for
from shoal.runner.kvstore import KVStore
from shoal.runner.results import NO_TOKENS, DrawnTokens, PromptLogprobs, step_result
from shoal.runner.runner import ForwardState, Runner
from shoal.runner.step import PassShape, Tables, count_blocks, fill, lay_out, layout_of, new_blocks, padded

DECODES = (16, 64, 256, 1024)  # beside prompts in one graph
VERIFYING = (1, 2, 4, 8, 16, 32, 64, 256, 1024)  # rows of a graph in which some have several positions
RECORDED = 256  # rows that verify drafts, of the graphs that are recorded before they are needed
LONG_DRAFTS = 8  # … and of those with drafts of all lengths
TIMED = 2  # replays of a graph that are timed; the fastest counts
REHEARSED = (1, 2, 4, 16, 64)  # batch sizes that are computed by different kernels
GREEDY = SamplingParams(temperature=0.0)
FILTERED = SamplingParams(temperature=1.0, top_k=50, top_p=0.9)
ALL = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, logprobs=1)  # takes the most memory
STAGED = 4  # buffers that passes are written into, in turns
PROMPTS = 32  # blocks of queries in a graph beyond those that its tokens fill


@dataclass(frozen=True)
class QueuedForward:
    """A pass on the stream whose tokens are not chosen yet."""

    plan: StepPlan
    draws: PassDraws
    since: torch.cuda.Event
    padded: int  # positions of padding that are computed
    cold: bool = False  # it did not run as a graph, but will
    hidden: Tensor | None = None  # states of all positions, where prompt logprobs need them
    drafted: Ints | None = None  # pinned: the draft tokens that were on the device
    computed: ForwardState | None = None  # of a pass that is computed as on any device


@dataclass(frozen=True)
class QueuedPass:
    """A whole pass on the stream, as far as the host knows it."""

    forward: QueuedForward
    until: torch.cuda.Event
    masks: LateMasks | None
    cold: bool
    drawn: npt.NDArray[np.int32] | None  # pinned: tokens, then the bits of their best scores
    logprobs: list[tuple[int, Logprobs]]
    prompt_logprobs: PromptLogprobs
    finished: StepResult | None = None  # of a pass that is computed as on any device


class Staging:
    """Pinned memory in which the host writes the tables of a pass, and from which they are copied to the device."""

    def __init__(self, size: int, first: int, lines: int) -> None:
        """first: where the pass's tables begin, behind the draw table of so many lines."""
        self.host = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self.array = self.host.numpy()
        self.draw_table = self.array[:first].reshape(COLUMNS, lines)
        self._first = first
        self._tables: dict[PassShape, Tables] = {}

    def tables(self, shape: PassShape) -> Tables:
        if shape not in self._tables:
            self._tables[shape] = lay_out(self.array, shape, self._first)
        return self._tables[shape]


@cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """One stream for all executors of a device: torch caches memory by stream, so they reuse each other's."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaExecutor:
    """Queues passes on one stream, from the calling thread."""

    def __init__(self, runner: Runner, most_tokens: int, most_drafts: int = 0, in_flight: int = STAGED - 2) -> None:
        """most_tokens: of a pass; most_drafts: of a row; in_flight: passes, usually."""
        self.runner = runner
        self.model, self.kv, self.sampler = runner.model, runner.kv, runner.sampler
        self.device = self.kv.data.device
        self.stream = stream_of(self.device)
        self.graphs = Graphs()
        ops, spec = self.model.ops.pass_ops, self.model.spec
        assert ops is not None, "kernels that cannot be recorded"
        self.ops = ops
        kind = (spec.heads // spec.kv_heads, spec.head_dim, self.model.dtype)
        self.queries, self.few = ops.queries_per_block(*kind), ops.few_queries(*kind)
        self.drafts = most_drafts
        self._lines = most_lines(runner.tables.blocks.shape[0], most_drafts)
        largest = PassShape(max(most_tokens, TOKENS[-1]), self._lines, TOKENS[-1] + PROMPTS, self._lines)
        with torch.cuda.stream(self.stream), torch.inference_mode():
            self.block_tables = torch.zeros(runner.tables.blocks.shape, dtype=torch.int32, device=self.device)
            self._first = COLUMNS * self._lines  # where the pass's tables begin in the buffer, behind the draw table
            self._size = self._first + largest.size
            self._buffer = torch.zeros(self._size, dtype=torch.int32, device=self.device)
            staged = max(STAGED, in_flight + 2)
            self._staged = deque(Staging(self._size, self._first, self._lines) for _ in range(staged))
            self._draw_table = self._buffer[: self._first].view(COLUMNS, self._lines)
            shape = (self._lines, spec.hidden_size)
            self._scored = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
            self._drawn = torch.zeros(2 * self._lines, dtype=torch.int32, device=self.device)
        self.model.reserve_positions(self.block_tables.shape[1] * self.kv.block_size)
        torch.cuda.synchronize(self.device)  # tensors made on other streams are ready
        self._forward: QueuedForward | None = None
        self._passes: deque[QueuedPass] = deque()

    def recordings(self, most: int) -> Recordings:
        """Record the graphs of all decodes of up to `most` rows, in small steps, while no pass is in flight.

        And of some rows that verify drafts. The others (of many such rows, beside prompts, with a long past, with
        filters) are too many: they are recorded when they occur. Yields the positions of each, and the seconds that it
        takes while there is no past; None: some of that is done, and requests may come in between.
        """
        shapes = [PassShape(size, size, 0, size) for size in LINES if size <= min(most, self._lines)]
        if self.drafts:
            shapes += verifying_shapes(min(most, RECORDED), self.drafts + 1, self.few, self._lines)
        for shape in shapes:
            size, best_s = shape.lines, math.inf
            for _ in range(2 + TIMED):  # as it is, then recorded; if requests did that already, a pass of padding
                yield None
                with self._here():
                    work = partial(self._body, self._send(NOTHING, draws_of(NOTHING), shape), shape)
                    since = _now()
                    there = self.graphs.run(shape, work)
                    there = self.graphs.run(("head", size, None), partial(self._head, size, None)) and there
                    until = _now()
                    until.synchronize()
                    best_s = min(best_s, since.elapsed_time(until) / 1000) if there else best_s
            yield shape.tokens, best_s

    @contextmanager
    def _here(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            yield

    # ---- forward --------------------------------------------------------------------------------------------------

    def forward(self, plan: StepPlan) -> None:
        with self._here():
            since = _now()
            self.runner.update(plan)
            draws = draws_of(plan)
            if not len(plan.rows):  # only copies of blocks
                self._forward = QueuedForward(plan, draws, since, 0)
                return
            if plan.width or draws.lines > self._lines:
                computed = self._compute(plan, draws)
                padding = len(computed.inputs.ids) - len(plan.tokens)
                self._forward = QueuedForward(plan, draws, since, padding, computed=computed)
                return
            shape, recorded = self._shape(plan, draws)
            work = partial(self._body, self._send(plan, draws, shape), shape)
            kept: Tensor | None = None
            cold = False
            if recorded and not self.runner.needs_hidden:
                cold = not self.graphs.run(shape, work)
            else:
                kept = work()
            padding = shape.tokens - len(plan.tokens)
            self._forward = QueuedForward(plan, draws, since, padding, cold, kept, self._drafted(draws))

    def _drafted(self, draws: PassDraws) -> Ints | None:
        """The draft tokens on the device as they are in this pass; on the host when the pass has come back."""
        if not draws.are_late:
            return None
        there = self.runner.tables.drafted
        host = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        host.copy_(there, non_blocking=True)
        found: Ints = host.numpy()
        return found

    def _shape(self, plan: StepPlan, draws: PassDraws) -> tuple[PassShape, bool]:
        """The tables' sizes, and whether passes of these sizes are worth recording."""
        tokens, rows, drawing = len(plan.tokens), len(plan.rows), draws.lines
        layout = layout_of(plan, self.few[-1])
        decodes = len(layout.decodes)
        long = int(plan.starts[layout.decodes].max(initial=0)) >= self.ops.long_context
        queries = size_for(self.few, layout.most) or 1
        if decodes == rows:
            size, held = size_for(LINES if queries == 1 or rows == 1 else VERIFIED, tokens), size_for(VERIFYING, rows)
            if size is not None and size <= self._lines:
                return PassShape(size, size if queries == 1 else held or rows, 0, size, long, queries), True
            return PassShape(tokens, rows, 0, drawing, long, queries), False
        blocks = count_blocks(plan.counts[layout.chunks], self.queries)
        size, beside = size_for(TOKENS, tokens), size_for(DECODES, max(decodes, drawing))
        if size is not None and beside is not None:
            most = size // self.queries + PROMPTS
            if blocks <= most and beside <= self._lines:
                return PassShape(size, beside, most, beside, long, queries), True
        return PassShape(tokens, decodes, blocks, drawing, long, queries), False

    def _send(self, plan: StepPlan, draws: PassDraws, shape: PassShape) -> Tensor:
        """Send all tables of the pass in one copy, and add its new blocks to the block tables."""
        new = new_blocks(plan)
        until = self._first + shape.size
        size = until + new.size
        staging = self._stage(size)
        fill_draw_table(staging.draw_table, self.sampler.state, draws.line_rows, draws.positions)
        fill(staging.tables(shape), plan, draws, self.queries, self.few[-1])
        staging.array[until:size] = new.reshape(-1)
        host = staging.host[:size]
        if size <= self._size:
            buffer = self._buffer[:size]
            buffer.copy_(host, non_blocking=True)
        else:  # whole long prompts, or many rows that start; graphs read the fixed buffer, so it is filled as well
            buffer = host.to(self.device, non_blocking=True)
            kept = min(until, self._size)
            self._buffer[:kept].copy_(buffer[:kept])
        if new.size:
            self.ops.add_blocks(buffer[until:].view(-1, 3), self.block_tables)
        # a pass that is recorded now must read from memory that stays
        return self._buffer if until <= self._size else buffer

    def _stage(self, size: int) -> Staging:
        """Memory for so many numbers, from which nothing is being copied any more.

        A pass whose result was taken has been copied. Those in flight, and one that failed before it was in flight, use
        the newest buffers, so the oldest is free while there are few of them.
        """
        if size > self._size or len(self._passes) > len(self._staged) - 3:
            return Staging(size, self._first, self._lines)  # torch reuses it when it has been copied
        self._staged.rotate(-1)
        return self._staged[-1]

    def _body(self, buffer: Tensor, shape: PassShape) -> Tensor:
        """All layers; hidden states that are scored are set aside for the head."""
        tables = lay_out(buffer, shape, self._first)
        known, rows, at = tables.tokens
        late, size = self.runner.tables.late, self.kv.block_size
        ids, positions, slots = self.ops.place_tokens(known, rows, at, late, self.block_tables, size)
        prepared = self.ops.prepared(self.block_tables, tables.decodes, tables.blocks, shape.long, shape.queries)
        batch = Batch(positions, slots, [], [], self.block_tables, self.kv.block_size, prepared=prepared)
        hidden = self.model.forward(ids, batch, self.kv.layers)
        if shape.lines:
            torch.index_select(hidden, 0, tables.index, out=self._scored[: shape.lines])
        return hidden

    def _compute(self, plan: StepPlan, draws: PassDraws) -> ForwardState:
        new = new_blocks(plan)
        if len(new):
            self.ops.add_blocks(to_device(new.astype(np.int32), self.device), self.block_tables)
        return self.runner.compute(plan, draws)

    # ---- sample ---------------------------------------------------------------------------------------------------

    def sample(self, masks: LateMasks | None) -> None:
        forward, self._forward = self._forward, None
        assert forward is not None, "no pass was begun"
        plan = forward.plan
        with self._here():
            if forward.computed is not None:
                finished = self.runner.sample(plan, forward.computed, masks)
                self._passes.append(QueuedPass(forward, _now(), masks, False, None, [], (), finished))
                return
            drawn: npt.NDArray[np.int32] | None = None
            logprobs: list[tuple[int, Logprobs]] = []
            cold = forward.cold
            if forward.draws.lines:
                size, logprobs, known = self._choose(forward.draws, masks)
                cold = cold or not known
                host = torch.empty(2 * size, dtype=torch.int32, pin_memory=True)
                host.copy_(self._drawn[: 2 * size], non_blocking=True)
                drawn = host.numpy()
            if plan.kept >= 0:
                self.runner.tables.keep(plan.kept)
            of_prompts: PromptLogprobs = ()
            if forward.hidden is not None:
                starts = np.cumsum(plan.counts) - plan.counts
                of_prompts = self.runner.prompt_logprobs(plan, forward.hidden, starts.tolist())
            self._passes.append(QueuedPass(forward, _now(), masks, cold, drawn, logprobs, of_prompts))
            if forward.draws.has_drafts:
                self.runner.rule.foresee(forward.draws, self.sampler.state)

    def _choose(self, draws: PassDraws, masks: LateMasks | None) -> tuple[int, list[tuple[int, Logprobs]], bool]:
        """Tokens and best scores for the host, so many of each; lines that ask for more are chosen once more. And
        whether the graph was there."""
        count, asking = draws.lines, self.sampler.asking(draws.line_rows, draws.positions, masks)
        size = head_lines(draws)
        if size is None or size > self._lines or asking.all():
            size, asking, known = count, np.ones(count, dtype=np.bool_), True
        else:
            filters = filters_of(self.sampler.state, draws.line_rows[~asking])
            known = self.graphs.run(("head", size, filters), partial(self._head, size, filters))
        if not asking.any():
            return size, [], known
        return size, self._sample(size, np.flatnonzero(asking), draws, masks), known

    def _head(self, lines: int, filters: Filters | None) -> None:
        """A token for every line; without filters the likeliest."""
        scores = self.model.scores(self._scored[:lines])
        tokens, best = self._drawn[:lines], self._drawn[lines : 2 * lines].view(torch.float32)
        last_token = self.runner.tables.last_token  # of a row with several lines any one, which is never read
        if filters is None:
            self.ops.likeliest(scores, self._draw_table[ROW], last_token, tokens, best)
        else:
            self.ops.draw(scores, self._draw_table, last_token, tokens, best, filters)

    def _sample(self, size: int, lines: Ints, draws: PassDraws, masks: LateMasks | None) -> list[tuple[int, Logprobs]]:
        """Choose the tokens of these lines by Ops.choose, and their logprobs."""
        where, rows = to_device(lines, self.device), draws.line_rows[lines]
        logits = self.model.logits(self._scored[where])
        of_these = None if masks is None else masks.among(lines)
        expected = draws.expected[lines] if draws.has_drafts else None
        tokens, best, logprobs = self.sampler.sample(logits, rows, draws.positions[lines], of_these, expected)
        self.runner.tables.last_token[to_device(rows, self.device)] = tokens
        self._drawn[where] = tokens.to(torch.int32)
        self._drawn[size : 2 * size].view(torch.float32)[where] = best
        return [(int(lines[index]), one) for index, one in logprobs]

    # ---- result ---------------------------------------------------------------------------------------------------

    def result(self) -> StepResult:
        oldest = self._passes[0]
        oldest.until.synchronize()  # interrupted here, the result is still the next one
        self._passes.popleft()
        forward = oldest.forward
        busy_s = forward.since.elapsed_time(oldest.until) / 1000
        if oldest.finished is not None:
            return oldest.finished._replace(busy_s=busy_s)
        plan, draws, drawn = forward.plan, forward.draws, NO_TOKENS
        if forward.drafted is not None:
            draws = draws.settled(forward.drafted)
        copies = self.runner.copier.take(all_of_them=not len(plan.rows))
        if oldest.drawn is not None:
            numbers = oldest.drawn
            count, half = draws.lines, len(numbers) // 2
            best = numbers[half : half + count].view(np.float32)
            drawn = DrawnTokens(numbers[:count].astype(np.int64), best, oldest.logprobs)
        accepted, ends_at = self.runner.accepted(draws, drawn), self.sampler.rows.ends_at
        more = oldest.prompt_logprobs, forward.padded, busy_s, oldest.cold
        return step_result(plan, draws, drawn, accepted, ends_at, oldest.masks, copies, *more)

    def close(self) -> None:
        self.stream.synchronize()
        self.runner.copier.close()
        self.graphs.clear()


_NONE = np.empty(0, dtype=np.int64)
NOTHING = StepPlan(0, (), np.empty((0, 3), dtype=np.int64), _NONE, _NONE, _NONE, _NONE, _NONE, _NONE)


def _now() -> torch.cuda.Event:
    """An event recorded on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def most_lines(rows: int, drafts: int) -> int:
    """Lines that graphs are prepared for: all that so many rows with so many drafts each can have, up to 256; beyond
    that, two or more for each row on average, up to 1,024."""
    if drafts:
        rows = min(max(2 * rows, min((drafts + 1) * rows, DECODES[-2])), max(rows, DECODES[-1]))
    return size_for(DECODES, rows) or padded(rows)


def head_lines(draws: PassDraws) -> int | None:
    """Lines of the head's graph for these draws; None: there is none."""
    return size_for(VERIFIED if draws.has_drafts and len(draws.rows) > 1 else LINES, draws.lines)


def verifying_shapes(most: int, counts: int, few: tuple[int, ...], lines: int) -> list[PassShape]:
    """The passes of up to `most` rows that verify drafts, with up to `counts` positions each and `lines` in all."""
    sizes = [size for size in LINES if 2 <= size <= min(counts, few[-1], lines)]
    shapes = [PassShape(size, 1, 0, size, queries=size_for(few, size) or 1) for size in sizes]
    fewest = 2  # rows of a pass that is computed as one of `rows`
    for rows in VERIFYING[1:]:
        if fewest > most:
            break
        for at, queries in enumerate(few[1:], 1):
            if few[at - 1] >= counts or (at > 1 and rows > LONG_DRAFTS):
                break
            least, largest = fewest + few[at - 1], rows * min(queries, counts)
            until = min(size_for(VERIFIED, largest) or lines, lines)
            sizes = [size for size in VERIFIED if least <= size <= until]
            shapes += [PassShape(size, rows, 0, size, queries=queries) for size in sizes]
        fewest = rows + 1
    return shapes


def rehearse(
    model: Model,
    kv_dtype: torch.dtype,
    block_size: int,
    tokens: int,
    lines: int,
    progress: bool = False,
    most_drafts: int = 0,
) -> None:
    """Compute the largest possible passes, and one of each kind, over a KV cache of a single block.

    So the memory that passes need is allocated before the free memory is measured, and kernels are compiled before
    the first request: in parallel, because compiling one takes seconds on one processor.
    """
    store = KVStore(model.spec, 1, block_size, kv_dtype, "cuda")
    model.reserve_positions(tokens)  # before the threads start, which would race to do it

    def compute(rows: int, count: int, params: Sequence[SamplingParams], draws: int = 1) -> None:
        executor = CudaExecutor(Runner(model, store, rows, count, "cuda"), rows * count, draws - 1)
        executor.forward(_made_up(rows, count, params, block_size, draws))
        executor.sample(None)
        executor.result()
        executor.close()

    few = [count for count in _few_of(model)[1:] if most_drafts]
    rows = sorted({min(count, lines) for count in REHEARSED})
    works = [(1, tokens, [ALL], 1), (lines, 1, [FILTERED, ALL], 1)]
    works += [(count, 1, [GREEDY], 1) for count in rows]
    works += [(count, each, [GREEDY], each) for each in few for count in rows if count * each <= tokens]
    with ThreadPoolExecutor(thread_name_prefix="rehearse") as pool:
        futures = [pool.submit(compute, *work) for work in works]
        for one in tqdm(futures, desc="kernels", unit="pass", disable=not progress, leave=False):
            one.result()


def _few_of(model: Model) -> tuple[int, ...]:
    spec, ops = model.spec, model.ops.pass_ops
    assert ops is not None, "kernels that cannot be recorded"
    return ops.few_queries(spec.heads // spec.kv_heads, spec.head_dim, model.dtype)


def _made_up(rows: int, count: int, params: Sequence[SamplingParams], block_size: int, draws: int) -> StepPlan:
    """The first `count` positions of `rows` rows, all in block 0; the last params apply to all further rows."""
    blocks = (0,) * -(-count // block_size)
    starting = [
        RowStart(row, 0, (0,) * count, count, params[min(row, len(params) - 1)], 0, 0, frozenset(), blocks, False)
        for row in range(rows)
    ]
    zeros, ones = np.zeros(rows, dtype=np.int64), np.ones(rows, dtype=np.int64)
    tokens = np.zeros(rows * count, dtype=np.int64)
    grown = np.empty((0, 3), dtype=np.int64)
    return StepPlan(0, tuple(starting), grown, np.arange(rows), zeros, zeros, ones * count, ones * draws, tokens)
