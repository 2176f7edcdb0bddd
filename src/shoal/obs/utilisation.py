"""Utilisation: what passes compute and move, over what the device reaches (MFU and MBU), and how much of it is useful.

A reader of PassEvents that knows the model's costs. Owns sums since the start, and shares in which the past fades.
Useful is what is computed once for a request: no padding, no recomputation, no rejected draft tokens, no row of a
request that had ended. Knows no scheduler, no device and no clock; the device's rates are told to it once they have
been measured.
"""

import math
from typing import Any

from shoal.core.events import PassEvents
from shoal.core.work import NO_WORK, DeviceRates, ModelWork

FADE_S = 20.0  # seconds of computing after which a pass counts a third


class Utilisation:
    """Watches one engine; an Observer."""

    def __init__(self, work: ModelWork = NO_WORK) -> None:
        self.work = work
        self.rates: DeviceRates | None = None
        self.flop = self.useful_flop = self.moved_bytes = 0.0
        self._recent = [0.0, 0.0, 0.0, 0.0]  # FLOP, useful FLOP, bytes, seconds

    def learn(self, rates: DeviceRates) -> None:
        self.rates = rates

    def _of(self, events: PassEvents) -> tuple[float, float]:
        """FLOP and bytes of one pass."""
        computed = events.computed_tokens + events.padded_tokens
        # padding attends as far as what it pads
        flop = self.work.flop(computed, events.lines, events.pairs * computed / events.computed_tokens)
        return flop, self.work.moved_bytes(1, events.kv_reads + computed)

    def of_pass(self, events: PassEvents) -> tuple[float | None, float | None]:
        """MFU and MBU of one pass; None: not known."""
        if self.rates is None or not events.scheduled_ids or events.busy_s <= 0:
            return None, None
        flop, moved = self._of(events)
        return flop / events.busy_s / self.rates.flop_s, moved / events.busy_s / self.rates.bytes_s

    def take(self, events: PassEvents) -> None:
        if not events.scheduled_ids:
            return
        computed = events.computed_tokens + events.padded_tokens
        useful = max(0, events.computed_tokens - events.recomputed_tokens - events.vain_tokens) / computed
        flop, moved = self._of(events)
        self.flop += flop
        self.useful_flop += flop * useful
        self.moved_bytes += moved
        if events.busy_s > 0:
            kept = math.exp(-events.busy_s / FADE_S)
            new = (flop, flop * useful, moved, events.busy_s)
            self._recent = [kept * old + one for old, one in zip(self._recent, new, strict=True)]

    def shares(self) -> dict[str, float]:
        """Lately: mfu, mbu and useful. NaN: the device's rates are not known, or there was no pass yet."""
        flop, useful, moved, seconds = self._recent
        rates = self.rates
        known = rates is not None and seconds > 0
        return {
            "mfu": flop / seconds / rates.flop_s if rates is not None and known else math.nan,
            "mbu": moved / seconds / rates.bytes_s if rates is not None and known else math.nan,
            "useful": useful / flop if flop else math.nan,
        }

    def state(self) -> dict[str, Any]:
        """For people; what is not known is left out."""
        return {name: round(share, 4) for name, share in self.shares().items() if math.isfinite(share)}
