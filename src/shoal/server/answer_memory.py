"""The memory of whole answers: a limit over all that are being collected or sent in one front.

Owns the count of logprobs they keep, the only part of an answer that a request can make large at little cost. Knows
calls; no HTTP beyond the errors.
"""

from functools import partial

from shoal.errors import Rejected
from shoal.server.answer_size import HOW, MOST_ENTRIES
from shoal.server.errors import BadField
from shoal.server.jobs import Call, uncounted


class AnswerMemory:
    """Counts the logprobs that the answers of one front hold while they are collected.

    When there are too many, the answer with the most of them is given up, so that small ones are never the victims.
    """

    def __init__(self, most_entries: int) -> None:
        self.most_entries = most_entries
        self.used = 0
        self._held: dict[Call, int] = {}

    def open(self, call: Call) -> None:
        """A call begins whose answer is kept until its end."""
        if call.prepared.jobs[0].params.logprobs is None:
            return
        if self.used * 4 > self.most_entries * 3:
            raise self._full("other answers hold almost all of the memory for logprobs")
        self._held[call] = 0
        call.on_logprobs = partial(self.add, call)

    def add(self, call: Call, entries: int) -> None:
        if call not in self._held:
            return
        self._held[call] += entries
        self.used += entries
        if self._held[call] > MOST_ENTRIES:
            call.fail(BadField("logprobs", f"the answer has more than {MOST_ENTRIES} logprobs; {HOW}, or stream it"))
        elif self.used > self.most_entries:
            largest = max(self._held, key=self._held.__getitem__)
            largest.fail(self._full("this answer and others hold all of the memory for logprobs"))
            self.close(largest)

    def close(self, call: Call) -> None:
        self.used -= self._held.pop(call, 0)
        call.on_logprobs = uncounted  # else the call would refer to itself, and outlive its end

    def _full(self, why: str) -> Rejected:
        return Rejected(f"{why} ({self.most_entries} of them); retry later, ask for fewer, or stream", 1.0)
