"""Fitting: from recorded passes to the terms of a cost model, with its error on passes that were held back.

Least squares of relative errors, with terms that are never negative: a pass of 5 ms counts as much as one of 500 ms,
and every term keeps its meaning. Passes that other programs disturbed weigh little. Owns the mathematics; knows passes
as sizes and seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.errors import BadConfig
from shoal.sim.cost import CopyCosts, CostModel, DeviceTimes, HostTimes, PassSize, Points

Floats = npt.NDArray[np.float64]
ENOUGH = 50  # passes for a fit
BETWEEN = 6  # passes between two points of a table, at least
MOST_POINTS = 12
ROUNDS = 4  # of weighing disturbed passes less


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One pass as it was measured."""

    size: PassSize
    device_s: float
    host_s: float | None  # None: the host had waited for requests before it


@dataclass(frozen=True, slots=True)
class TimedCopy:
    direction: str
    blocks: int
    seconds: float


@dataclass(frozen=True)
class CostFit:
    """A cost model, and how far it was off on passes that it had not seen: shares of their time."""

    costs: CostModel
    held_back: dict[str, float]


def fit_costs(passes: Sequence[TimedPass], copies: Sequence[TimedCopy] = ()) -> CostFit:
    """Every fifth pass is held back; the fit is made on the others, and its errors on those."""
    if len(passes) < ENOUGH:
        raise BadConfig(f"{len(passes)} passes were measured, and a fit needs {ENOUGH}; calibrate for longer")
    kept = [one for number, one in enumerate(passes) if number % 5]
    held = [one for number, one in enumerate(passes) if not number % 5]
    costs = CostModel(fit_device(kept), fit_host(kept), fit_copies(copies))
    return CostFit(costs, errors(costs, held))


def errors(costs: CostModel, passes: Sequence[TimedPass]) -> dict[str, float]:
    """Of the device's time, pass by pass, and of the sum of all."""
    off = np.array([costs.device_s(one.size) / one.device_s - 1 for one in passes])
    total = sum(costs.device_s(one.size) for one in passes) / sum(one.device_s for one in passes) - 1
    p50, p90, p99 = np.percentile(np.abs(off), [50, 90, 99])
    return {
        "passes": float(len(passes)),
        "p50": round(float(p50), 4),
        "p90": round(float(p90), 4),
        "p99": round(float(p99), 4),
        "total": round(float(abs(total)), 4),
    }


def fit_device(passes: Sequence[TimedPass]) -> DeviceTimes:
    """The tables and terms of a pass's time."""
    mixed = np.array([one.size.prompts for one in passes])
    positions = np.array([one.size.positions for one in passes], dtype=np.float64)
    sizes = [one.size for one in passes]
    terms = np.array([(s.rows, s.draws, s.reads, s.pairs, s.span) for s in sizes], dtype=np.float64)
    seconds = np.array([one.device_s for one in passes])
    tables, columns = [], []
    for kind in (False, True):
        chosen = mixed == kind
        at = knots(positions[chosen]) if chosen.any() else []
        tables.append(at)
        columns.append(hats(positions, at) * chosen[:, None])
    found = solve(np.hstack([*columns, terms]), seconds)
    weights = [column.sum(axis=0) for column in columns]
    decode, more = found[: len(tables[0])], found[len(tables[0]) :]
    points = [table(tables[0], decode, weights[0]), table(tables[1], more[: len(tables[1])], weights[1])]
    if not points[0] or not points[1]:  # one kind was never seen: the other stands for it
        points = [points[0] or points[1], points[1] or points[0]]
    return DeviceTimes(points[0], points[1], *(float(one) for one in found[-terms.shape[1] :]))


def knots(positions: Floats) -> list[float]:
    """Where a table has points: at the ends, and between them where enough passes are."""
    found = [float(positions.min())]
    ordered = np.sort(positions)
    most = ordered[-1]
    while found[-1] < most:
        after = ordered[np.searchsorted(ordered, found[-1], side="right") :]
        wanted = max(found[-1] * (most / ordered[0]) ** (1 / MOST_POINTS), found[-1] + 1)
        if len(after) > BETWEEN:
            wanted = max(wanted, float(after[BETWEEN]))
        beyond = after[after >= wanted]
        if len(beyond) <= BETWEEN:
            found.append(float(most))
        else:
            found.append(float(beyond[0]))
    return found


def hats(positions: Floats, at: Sequence[float]) -> Floats:
    """One column per point: 1 at the point, falling in a straight line to 0 at its neighbours."""
    if not at:
        return np.zeros((len(positions), 0))
    return np.stack([np.interp(positions, at, row) for row in np.eye(len(at))], axis=1)


def table(at: Sequence[float], seconds: Floats, weights: Floats) -> Points:
    """More positions never take less time: points that fall share their mean, weighted by the passes near them. Nor
    does any pass take none.

    >>> table([1, 8, 64, 99], np.array([3.0, 1.0, 4.0, 4.5]), np.array([1.0, 3.0, 1.0, 1.0]))
    ((1, 1.5), (8, 1.5), (64, 4.0), (99, 4.5))
    """
    merged: list[tuple[float, float, int]] = []  # (mean, weight, points)
    for value, weight in zip(np.maximum(seconds, 1e-7), np.maximum(weights, 1e-9), strict=True):
        mean, mass, count = float(value), float(weight), 1
        while merged and merged[-1][0] > mean:
            before, its_mass, its_count = merged.pop()
            mean = (mean * mass + before * its_mass) / (mass + its_mass)
            mass, count = mass + its_mass, count + its_count
        merged.append((mean, mass, count))
    rising = [mean for mean, _, count in merged for _ in range(count)]
    return tuple((round(one), value) for one, value in zip(at, rising, strict=True))


def fit_host(passes: Sequence[TimedPass]) -> HostTimes:
    timed = [(one.size, one.host_s) for one in passes if one.host_s is not None]
    if len(timed) < ENOUGH // 2:
        return HostTimes()
    terms = np.array([(1, size.rows, size.starting) for size, _ in timed], dtype=np.float64)
    found = solve(terms, np.array([max(seconds, 1e-7) for _, seconds in timed]))
    return HostTimes(*(float(one) for one in found))


def fit_copies(copies: Sequence[TimedCopy]) -> CopyCosts:
    """Out and in share what each copy costs besides its blocks."""
    if not copies:
        return CopyCosts()
    terms = np.array(
        [(1, one.blocks * (one.direction == "out"), one.blocks * (one.direction == "in")) for one in copies]
    )
    found = solve(terms.astype(np.float64), np.array([max(one.seconds, 1e-7) for one in copies]))
    return CopyCosts(*(float(one) for one in found))


def solve(terms: Floats, seconds: Floats) -> Floats:
    """Coefficients, none below zero, with the least relative errors; disturbed passes are weighed less each round."""
    weights = np.ones(len(seconds))
    found = np.zeros(terms.shape[1])
    for _ in range(ROUNDS):
        scale = (weights / seconds)[:, None]
        found = nonnegative(terms * scale, weights)
        off = np.abs(terms @ found / seconds - 1)
        usual = 1.5 * float(np.median(off)) + 1e-4
        weights = np.minimum(1.0, 2 * usual / np.maximum(off, 1e-9))
    return found


def nonnegative(a: Floats, b: Floats) -> Floats:
    """Least squares with x ≥ 0, by Lawson and Hanson's active sets."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    gram, right = a.T @ a + 1e-9 * len(b) * np.eye(a.shape[1]), a.T @ b
    x, used = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):
        slope = right - gram @ x
        slope[used] = -np.inf
        best = int(np.argmax(slope))
        if slope[best] <= 1e-9 * max(1.0, float(np.abs(right).max())):
            break
        used[best] = True
        while True:
            trial = np.zeros_like(x)
            trial[used] = np.linalg.solve(gram[np.ix_(used, used)], right[used])
            if (trial[used] > 0).all():
                break
            falling = used & (trial <= 0)
            step = float(np.min(x[falling] / np.maximum(x[falling] - trial[falling], 1e-300)))
            x = x + step * (trial - x)
            used &= x > 1e-15
            x[~used] = 0.0
        x = trial
    found: Floats = x / scale
    return found
