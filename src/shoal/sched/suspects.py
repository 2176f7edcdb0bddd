"""Suspects: requests that may have broken a pass.

When a pass raises, every request in it is a suspect. Suspects are run again apart from all others, and in halves when
it happens again, until the one that does it is alone: only that one fails. A suspect that has one more token than
before is cleared. So a fault that does not come back harms no request.

    pass with A B C D raises ──► A B C D raise again ──► A B: cleared ──► C D raise ──► C: cleared, D raises: D fails

Knows requests and how many tokens they have. Does not know what a pass is.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from shoal.core.request import Request, State


class Suspects:
    """Groups to be run on their own, one after the other; the first is being tried."""

    def __init__(self) -> None:
        self._groups: deque[dict[Request, int]] = deque()  # request → its output tokens when it was accused
        self._brought: dict[int, dict[Request, int]] = {}  # those that came with their suspicion, by part

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[Request]:
        return iter([request for group in self._groups for request in group])

    @property
    def group(self) -> dict[Request, int]:
        """The suspects that may run now."""
        return self._groups[0]

    def accuse(self, requests: Sequence[Request]) -> Request | None:
        """A pass of these has raised. Returns the one that did it, once there is no doubt."""
        accused = [request for request in requests if request.state is not State.FINISHED]
        tried = self._groups[0] if self._groups else {}
        if not accused:
            return None
        if all(request in tried for request in accused):
            if len(accused) == 1:
                self.forget(accused[0])
                return accused[0]
            self._remove(accused)
            half = len(accused) // 2
            for part in (accused[half:], accused[:half]):
                self._groups.appendleft(_marked(part))
        else:
            self._remove(accused)
            self._groups.append(_marked(accused))
        return None

    def add(self, request: Request, which: int = 0) -> None:
        """It was in a pass that broke an engine before this one, in this part of it."""
        group = self._brought.get(which)
        if group is None or not any(one is group for one in self._groups):
            group = self._brought[which] = {}
            self._groups.append(group)
        group[request] = request.outputs

    def clear(self) -> None:
        """Clear those in the group that have a new token, or have ended."""
        while self._groups:
            group = self._groups[0]
            for request, outputs in list(group.items()):
                if request.state is State.FINISHED or request.outputs > outputs:
                    del group[request]
            if group:
                return
            self._groups.popleft()

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._remove([request])

    def _remove(self, requests: Sequence[Request]) -> None:
        for group in self._groups:
            for request in requests:
                group.pop(request, None)
        self._groups = deque(group for group in self._groups if group)


def _marked(requests: Sequence[Request]) -> dict[Request, int]:
    return {request: request.outputs for request in requests}
