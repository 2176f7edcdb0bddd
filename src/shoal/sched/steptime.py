"""How long a pass takes: a model fitted online from the engine's own passes.

    seconds = constant + per_token · positions computed + per_read · KV positions read

Passes of about the same size are remembered as one point, a mean in which the past fades. So a thousand decodes in a
row do not wash out what a large prompt cost, and a machine that gets busier is followed. Owns the fit. Knows no
requests and no clock: the committer passes in how long a pass took.
"""

import math

ENOUGH = 8  # passes before it is believed
FADE = 0.15  # what the newest pass counts in the mean of its point, at least
MOST_WEIGHT = 8  # passes that one point counts for, at most
LONGEST_S = 3600.0
REFIT = 8  # passes between two fits, once there were many
DOUBT = 2.0  # how far a pass with prompts may be off before any was seen
REASSURED = 0.8  # what is left of the doubt after a pass that was as predicted
RIDGE = 1e-6  # of each feature's own size: keeps the fit sound while passes are all alike

Fit = tuple[float, float, float]


class Point:
    """Passes of about one size."""

    __slots__ = ("kv_read", "passes", "seconds", "tokens")

    def __init__(self) -> None:
        self.passes = 0
        self.tokens = self.kv_read = self.seconds = 0.0

    def add(self, tokens: int, kv_read: int, seconds: float) -> None:
        self.passes += 1
        share = max(1 / self.passes, FADE)
        self.tokens += share * (tokens - self.tokens)
        self.kv_read += share * (kv_read - self.kv_read)
        self.seconds += share * (seconds - self.seconds)


class StepModel:
    """Weighted least squares over the points, with coefficients that are never negative.

    >>> model = StepModel()
    >>> for tokens in range(1, 200):
    ...     model.learn(tokens, 100 * (tokens % 7), 0.010 + 0.002 * tokens + 0.00001 * 100 * (tokens % 7))
    >>> round(model.seconds(150, 300), 2), abs(model.tokens_within(0.3, 300) - 143) <= 1
    (0.31, True)
    """

    def __init__(self) -> None:
        self.passes = 0
        self.largest = 0  # positions of the largest pass seen
        self.miss = DOUBT  # how many times longer than predicted a pass with prompts took of late, at worst; at least 1
        self._points: dict[tuple[int, int], Point] = {}  # at most some hundreds: sizes by powers of two
        self._fit: Fit | None = None  # None: to be solved again

    @property
    def known(self) -> bool:
        return self.passes >= ENOUGH

    def learn(self, tokens: int, kv_read: int, seconds: float, prompts: bool = False) -> None:
        """A pass took so long; there were prompts in it or not."""
        if not 0 < seconds < LONGEST_S or tokens < 1:
            return
        if prompts and self.known:
            predicted = max(self.seconds(tokens, kv_read), 1e-9)
            self.miss = min(DOUBT, max(seconds / predicted, 1 + (self.miss - 1) * REASSURED))
        size = (tokens.bit_length(), kv_read.bit_length())
        if size not in self._points:
            self._points[size] = Point()
        self._points[size].add(tokens, kv_read, seconds)
        self.passes += 1
        self.largest = max(self.largest, tokens)
        if self.passes <= 8 * ENOUGH or self.passes % REFIT == 0:
            self._fit = None

    @property
    def coefficients(self) -> Fit:
        """(constant, per token, per KV position read), in seconds."""
        if self._fit is None:
            self._fit = self._solve()
        return self._fit

    def seconds(self, tokens: float, kv_read: float) -> float:
        """What a pass should take."""
        constant, per_token, per_read = self.coefficients
        return constant + per_token * tokens + per_read * kv_read

    def prompt_s(self, tokens: int, budget: int) -> float:
        """How long it takes to compute a prompt in passes of `budget` positions; 0 while no pass is known."""
        if not self.known:
            return 0.0
        passes = -(-tokens // budget)
        return passes * self.coefficients[0] + self.added_s(tokens, passes)

    def added_s(self, tokens: int, passes: float) -> float:
        """What a prompt, computed in so many chunks, adds to passes that run anyway: its positions and their reads."""
        _, per_token, per_read = self.coefficients
        return per_token * tokens + per_read * tokens * (passes + 1) / 2

    def soonest_s(self, tokens: int, budget: int, running: int, kv_read: int) -> float:
        """The least time to the first token of a prompt that starts now, when so many requests decode beside it and
        read so many positions; reads of its own are left out."""
        constant, per_token, per_read = self.coefficients
        passes = -(-tokens // budget)
        return passes * (constant + per_token * running + per_read * kv_read) + per_token * tokens

    def tokens_within(self, seconds: float, kv_read: float) -> int:
        """How many positions a pass may compute to be done in time; 0 if not even one."""
        constant, per_token, per_read = self.coefficients
        left = seconds - constant - per_read * kv_read
        if left <= 0:
            return 0
        return min(int(left / per_token), 2**31) if per_token > 0 else 2**31

    def _solve(self) -> Fit:
        """The best fit, or, where a coefficient would be below zero, the best without it."""
        points = [(min(one.passes, MOST_WEIGHT), one) for one in self._points.values()]
        if not points:
            return 0.0, 0.0, 0.0
        # relative errors count, not absolute ones: a decode of 5 ms must not drown beside a prompt of 500 ms
        weights = [weight / one.seconds**2 for weight, one in points]
        total = sum(weights)
        t = sum(w * one.tokens for w, (_, one) in zip(weights, points, strict=True)) / total
        r = sum(w * one.kv_read for w, (_, one) in zip(weights, points, strict=True)) / total
        s = sum(w * one.seconds for w, (_, one) in zip(weights, points, strict=True)) / total
        tt = rr = tr = ts = rs = 0.0
        for w, (_, one) in zip(weights, points, strict=True):
            dt, dr, ds = one.tokens - t, one.kv_read - r, one.seconds - s
            tt += w * dt * dt
            rr += w * dr * dr
            tr += w * dt * dr
            ts += w * dt * ds
            rs += w * dr * ds
        tt += RIDGE * total * t * t
        rr += RIDGE * total * r * r
        slopes = [_both(tt, tr, rr, ts, rs), (ts / tt if tt else 0.0, 0.0), (0.0, rs / rr if rr else 0.0), (0.0, 0.0)]
        fits = [(s - a * t - b * r, a, b) for a, b in slopes]
        # and through the origin: where time grows faster than tokens, the constant would be below zero
        tt0, rr0, tr0, ts0, rs0 = (
            tt + total * t * t,
            rr + total * r * r,
            tr + total * t * r,
            ts + total * t * s,
            rs + total * r * s,
        )
        fits += [(0.0, *_both(tt0, tr0, rr0, ts0, rs0)), (0.0, ts0 / tt0, 0.0), (0.0, 0.0, rs0 / rr0 if rr0 else 0.0)]

        def error(fit: Fit) -> float:
            constant, a, b = fit
            off = s - constant - a * t - b * r
            return a * a * tt + b * b * rr + 2 * a * b * tr - 2 * (a * ts + b * rs) + total * off * off

        return min((fit for fit in fits if min(fit) >= 0), key=error)


def _both(tt: float, tr: float, rr: float, ts: float, rs: float) -> tuple[float, float]:
    determinant = tt * rr - tr * tr
    if determinant <= 1e-12 * tt * rr:
        return -math.inf, -math.inf
    return (ts * rr - rs * tr) / determinant, (rs * tt - ts * tr) / determinant


class CopyTimes:
    """How long it takes to copy a block, out and in: a mean in which the past fades."""

    NEWEST = 0.2  # weight of the newest copy

    def __init__(self) -> None:
        self.block_s: dict[bool, float] = {}  # out → seconds

    def learn(self, out: bool, blocks: int, seconds: float) -> None:
        if blocks < 1 or not 0 < seconds < LONGEST_S:
            return
        newest = seconds / blocks
        before = self.block_s.get(out, newest)
        self.block_s[out] = before + self.NEWEST * (newest - before)

    def both_s(self) -> float | None:
        """Out and back; one stands for the other where it is not known. None: no copy was seen yet."""
        out_s, in_s = self.block_s.get(True), self.block_s.get(False)
        if out_s is None and in_s is None:
            return None
        return (out_s if out_s is not None else in_s or 0.0) + (in_s if in_s is not None else out_s or 0.0)
