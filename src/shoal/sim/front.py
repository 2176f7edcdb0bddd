"""The fronts on virtual time: what happens to a request before it reaches the engine, and to tokens on their way back.

A front is one event loop, so it does one thing at a time: it reads and tokenizes requests, and detokenizes and writes
the tokens of each pass. Owns when each front is free. Knows times and counts, no requests.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class FrontTimes:
    """What one front takes, in seconds. All 0: the client sits in the engine's process."""

    request_s: float = 0.0  # reading one request and sending it to the engine
    prompt_token_s: float = 0.0  # tokenizing
    hop_s: float = 0.0  # from the engine to the front, and from there to the client, besides the front's own work
    pass_s: float = 0.0  # each message of the engine
    token_s: float = 0.0  # each token in it: detokenizing, writing


class SimulatedFronts:
    """So many fronts, by turns for requests; each pass's tokens are spread evenly over them.

    >>> fronts = SimulatedFronts(FrontTimes(request_s=0.002, token_s=0.001))
    >>> fronts.submitted_s(1.0, prompt=10), fronts.submitted_s(1.0, prompt=10)   # the second waits for the first
    (1.002, 1.004)
    >>> fronts.delivered_s(2.0, tokens=3)
    2.003
    """

    def __init__(self, times: FrontTimes, count: int = 1) -> None:
        self.times = times
        self._free_s = [0.0] * count
        self._turn = 0
        self.busy_s = 0.0

    def submitted_s(self, at_s: float, prompt: int) -> float:
        """When a request that arrives now is with its engine."""
        times = self.times
        took_s = times.request_s + times.prompt_token_s * prompt
        begun_s = max(at_s, self._free_s[self._turn])
        self._free_s[self._turn] = begun_s + took_s
        self._turn = (self._turn + 1) % len(self._free_s)
        self.busy_s += took_s
        return begun_s + took_s

    def delivered_s(self, at_s: float, tokens: int) -> float:
        """When the tokens of a pass that was committed now are with their clients."""
        times, latest_s = self.times, at_s
        share = tokens / len(self._free_s)
        for number, free_s in enumerate(self._free_s):
            took_s = times.pass_s + times.token_s * share
            self._free_s[number] = max(at_s, free_s) + took_s
            self.busy_s += took_s
            latest_s = max(latest_s, self._free_s[number])
        return latest_s + times.hop_s
