"""How long passes of decodes take, by their number of positions; and how long the device waits between passes.

The fit of steptime.py is one line for passes of all sizes. What one more position costs in a small pass is another
matter: nearly nothing while the weights are read anyway, a whole tile or a larger graph beyond that. So passes without
prompts are also remembered by their size, and sizes in between are interpolated:

    seconds   ·                    ╱ beyond the largest size seen: the line of steptime.py
              │        ___·___·___╱
              │  ·────·
              └──1────2───4───8───── positions

A machine that gets busier is slower at all sizes, also at those that are not measured now: so there is one pace for
all of them, which follows quickly, and the sizes are compared at the same pace. More positions never take less time:
sizes that seem to are averaged. One that was not seen for many passes is forgotten, so that a bad measurement does not
rule it out for good. Where passes were rehearsed before there were requests, a size that is not remembered takes what
it took then, at the present pace: else a size that seems dear would never be tried. Owns these means. Knows no requests
and no clock.
"""

from bisect import bisect_left

from shoal.sched.steptime import LONGEST_S, StepModel

FADE = 0.04  # what the newest pass counts in the mean of its size, at least
FOLLOW = 0.2  # how much of a change of pace is followed with one pass
WILD = 1.5  # a pass that took more times what was expected than this counts as so many times that
FIRST_WILD = 4.0  # … of a size without drafts that is hardly known
SEEN = 3  # passes after which a size counts as measured; the first is what was expected
STALE = 64  # passes after which it must be measured again
TRUSTED = 25  # passes that one size counts for, at most
FORGET = 1024  # passes
SMOOTH = 0.005  # by which share a size may change before the curve is made again
UNKNOWN = 0.05  # what a position adds to a pass of which nothing is known, as a share of it


class Size:
    """Passes of about so many positions."""

    __slots__ = ("drawn", "passes", "positions", "seconds", "seen")

    def __init__(self, positions: float, seconds: float) -> None:
        self.passes = 0
        self.drawn = (0.0, 0.0)  # positions and seconds, when the curve was made
        self.positions = positions
        self.seconds = seconds  # at a pace of 1, without what reading KV takes
        self.seen = 0  # when the last of them was

    @property
    def changed(self) -> bool:
        """Whether the curve shows something else."""
        positions, seconds = self.drawn
        return abs(self.positions - positions) > SMOOTH * positions or abs(self.seconds - seconds) > SMOOTH * seconds


class DecodeTimes:
    """
    >>> times = DecodeTimes(StepModel())
    >>> for _ in range(200):
    ...     times.learn(1, 100, 0.010)
    ...     times.learn(5, 100, 0.012)
    >>> round(times.seconds(3, 100), 4)
    0.011
    """

    def __init__(self, steps: StepModel) -> None:
        self._steps = steps
        self._sizes: dict[int, Size] = {}
        self._rehearsed: dict[int, Size] = {}  # what stands for sizes that are not in `_sizes`
        self._curve: list[tuple[float, float]] | None = None  # (positions, seconds), ascending; None: to be made again
        self._pace = 1.0
        self._passes = 0

    @property
    def known(self) -> bool:
        return bool(self._sizes)

    def learn(self, positions: int, kv_read: int, seconds: float, drafts: bool = False) -> None:
        """A pass without prompts took so long; drafts: it had some."""
        if not 0 < seconds < LONGEST_S or positions < 1:
            return
        net = max(seconds - self._read_s(kv_read), 0.2 * seconds)
        if not self._sizes:  # so that the first size takes 1, or what it took when it was rehearsed
            self._pace *= net / self._net(positions) if self._rehearsed else net / self._pace
        expected = self._net(positions) if self._sizes else net
        self._passes += 1
        size = self._sizes.get(size_of(positions))
        guessed = not drafts and (size is None or size.passes < SEEN)
        net = min(net, (FIRST_WILD if guessed else WILD) * expected)
        if size is None:  # what was expected counts in its first measurements, and soon no more
            size = self._sizes[size_of(positions)] = Size(positions, expected / self._pace)
            size.passes = 1 if self._passes > 1 else 0
        else:  # the pace is told by sizes that are well known
            self._pace *= (net / expected) ** (FOLLOW * min(1.0, size.passes / TRUSTED))
        size.passes += 1
        share = max(2 / (size.passes + 1), FADE)
        size.positions += share * (positions - size.positions)
        size.seconds += share * (net / self._pace - size.seconds)
        size.seen = self._passes
        if size.changed:
            self._curve = None
        if self._passes % FORGET == 0:
            self._sizes = {key: one for key, one in self._sizes.items() if self._passes - one.seen < FORGET}
            self._curve = None

    def measured(self, positions: int) -> bool:
        """Whether passes of about this size were seen, not long ago, and not only guessed from others."""
        size = self._sizes.get(size_of(positions))
        if size_of(positions) in self._rehearsed:
            return True
        return size is not None and size.passes >= SEEN and self._passes - size.seen < STALE

    def rehearse(self, positions: int, seconds: float) -> None:
        """A pass of so many positions that read no KV took so long."""
        if 0 < seconds < LONGEST_S and positions > 0:
            size = self._rehearsed[size_of(positions)] = Size(positions, seconds / self._pace)
            size.passes = 1
            self._curve = None

    def seconds(self, positions: int, kv_read: int) -> float:
        """What a pass of so many positions should take."""
        if self._sizes or self._rehearsed:
            return self._net(positions) + self._read_s(kv_read)
        if self._steps.known:
            return self._steps.seconds(positions, kv_read)
        return 1.0 + UNKNOWN * positions

    def _net(self, positions: int) -> float:
        """… at the present pace, without reading KV."""
        curve = self._curve
        if curve is None:
            sizes = {**self._rehearsed, **self._sizes}
            curve = self._curve = rising(sorted(sizes.values(), key=lambda size: size.positions))
            for size in sizes.values():
                size.drawn = size.positions, size.seconds
        above = bisect_left(curve, (positions, 0.0))
        if above == len(curve):
            at, seconds = curve[-1]
            seconds *= self._pace
            return seconds + self._slope(seconds, at) * (positions - at)
        if above == 0:
            at, seconds = curve[0]
            seconds *= self._pace
            return max(seconds - self._slope(seconds, at) * (at - positions), 0.2 * seconds)
        (low, less), (high, more) = curve[above - 1], curve[above]
        return (less + (positions - low) / (high - low) * (more - less)) * self._pace

    def _slope(self, nearest_s: float, at: float) -> float:
        """What one more position adds to a pass of so many. While little is known: next to nothing for one, which reads
        the weights anyway; for several, as if all of them but the first cost as much."""
        if self._steps.known:
            return self._steps.coefficients[1]
        return nearest_s * max(UNKNOWN, (at - 1) / at**2)

    def _read_s(self, kv_read: int) -> float:
        """What reading so many KV positions adds."""
        return self._steps.coefficients[2] * kv_read if self._steps.known else 0.0


def rising(sizes: list[Size]) -> list[tuple[float, float]]:
    """(positions, seconds) of these sizes, where those that would fall are averaged with the ones before."""
    levels: list[tuple[float, float, int]] = []  # (seconds, weight, how many sizes)
    for size in sizes:
        seconds, weight, count = size.seconds, float(min(size.passes, TRUSTED)), 1
        while levels and levels[-1][0] > seconds:
            other, its, more = levels.pop()
            seconds = (seconds * weight + other * its) / (weight + its)
            weight += its
            count += more
        levels.append((seconds, weight, count))
    values = [seconds for seconds, _, count in levels for _ in range(count)]
    return [(size.positions, seconds) for size, seconds in zip(sizes, values, strict=True)]


def size_of(positions: int) -> int:
    """Positions, rounded down to three binary digits.

    >>> [size_of(positions) for positions in (1, 7, 9, 19, 100)]
    [1, 7, 8, 16, 96]
    """
    spare = max(positions.bit_length() - 3, 0)
    return positions >> spare << spare


class Gap:
    """How long the device waits for the host before a pass of one kind: a mean in which the past fades."""

    NEWEST = 0.1  # weight of the newest
    FIRST_S = 0.01  # the most that the first one may count

    __slots__ = ("passes", "seconds")

    def __init__(self) -> None:
        self.passes = 0
        self.seconds = 0.0

    def learn(self, seconds: float) -> None:
        most = WILD * self.seconds + 1e-4 if self.passes else self.FIRST_S
        self.passes += 1
        share = max(1 / self.passes, self.NEWEST)
        self.seconds += share * (min(max(seconds, 0.0), most) - self.seconds)
