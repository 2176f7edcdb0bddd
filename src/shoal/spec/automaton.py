"""A suffix automaton over tokens: the longest end of a text that occurs in it before, found token by token.

Each token costs amortised O(1), however long the text is. Owns one text and its index; knows nothing of requests.

A state stands for all substrings that end at the same places. `link` leads to the state of the longest shorter suffix
that also ends elsewhere. So after a token is added, the link of the newest state is the longest suffix of the text that
occurs earlier, and `end` of that state says where:

    text     the cat sat . the cat | ran          after the second "cat": the longest suffix that occurs before is
    place     0   1   2  3  4   5     6           "the cat", which ended at place 1; "sat . the cat …" followed it

Most states have one successor: it is kept in two arrays, and only states with several have a dictionary. A token takes
120 to 200 bytes in all.
"""

from array import array
from collections.abc import Iterable, Sequence

ROOT = 0
NONE = -1
RECENT = 3  # suffixes whose latest place is noted with each token; the place of shorter ones may be an older one


class Automaton:
    """
    >>> automaton = Automaton()
    >>> automaton.extend([7, 8, 9, 4, 7, 8])
    >>> automaton.length, automaton.end            # "7 8" occurs before and ended at place 1
    (2, 1)
    >>> automaton.follow(automaton.end, 3)
    [9, 4, 7]
    """

    __slots__ = ("_ends", "_last", "_lengths", "_links", "_more", "_targets", "_tokens", "branches", "end", "length",
                 "text")  # fmt: skip

    def __init__(self) -> None:
        self.text: list[int] = []
        self.length = 0  # of the longest suffix that occurs earlier in the text
        self.end = NONE  # a place where it ended; the latest that is known
        self.branches = False  # different tokens followed that suffix
        self._lengths = array("i", [0])  # of a state's longest substring
        self._links = array("i", [NONE])
        self._ends = array("i", [NONE])  # where a state's substrings ended, of late
        self._tokens = array("i", [NONE])  # the token that leads to …
        self._targets = array("i", [NONE])  # … the state's first successor
        self._more: dict[int, dict[int, int]] = {}  # state → token → its other successors
        self._last = ROOT

    def __len__(self) -> int:
        return len(self.text)

    @property
    def states(self) -> int:
        return len(self._lengths)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the end of the text. Hot: once per token of every request that is drafted for."""
        lengths, links, ends = self._lengths, self._links, self._ends
        firsts, targets, more, text = self._tokens, self._targets, self._more, self.text
        last, end = self._last, self.end
        for token in tokens:
            place = len(text)
            text.append(token)
            new = len(lengths)
            lengths.append(place + 1)
            links.append(ROOT)
            ends.append(place)
            firsts.append(NONE)
            targets.append(NONE)
            state, last = last, new
            while state != NONE:  # states that this token follows for the first time
                first = firsts[state]
                if first == NONE:
                    firsts[state] = token
                    targets[state] = new
                elif first == token:
                    break
                elif state not in more:
                    more[state] = {token: new}
                elif token in more[state]:
                    break
                else:
                    more[state][token] = new
                state = links[state]
            if state != NONE:
                after = targets[state] if firsts[state] == token else more[state][token]
                if lengths[state] + 1 != lengths[after]:
                    after = self._split(state, token, after)
                links[new] = after
            match = links[new]
            end = ends[match]
            for _ in range(RECENT):
                if match == ROOT:
                    break
                ends[match] = place
                match = links[match]
        if last != ROOT:
            match = links[last]
            self._last, self.length, self.end, self.branches = last, lengths[match], end, match in more

    def _split(self, state: int, token: int, after: int) -> int:
        """Give the shorter substrings of `after`, which now also end here, a state of their own."""
        links, firsts, targets, more = self._links, self._tokens, self._targets, self._more
        clone = len(self._lengths)
        self._lengths.append(self._lengths[state] + 1)
        links.append(links[after])
        self._ends.append(self._ends[after])
        firsts.append(firsts[after])
        targets.append(targets[after])
        if after in more:
            more[clone] = more[after].copy()
        links[after] = clone
        while state != NONE:
            if firsts[state] == token:
                if targets[state] != after:
                    break
                targets[state] = clone
            elif more.get(state, {}).get(token) == after:
                more[state][token] = clone
            else:
                break
            state = links[state]
        return clone

    def follow(self, end: int, most: int) -> list[int]:
        """The tokens after this place. At the end of the text they repeat, as what lies between repeated so far."""
        found = self.text[end + 1 : end + 1 + most]
        if found and len(found) < most:
            found = (found * (most // len(found) + 1))[:most]
        return found


class Cursor:
    """The longest suffix of another text that occurs in an automaton's, token by token; the automaton may grow.

    >>> history = Automaton()
    >>> history.extend([1, 2, 3, 4, 5])
    >>> cursor = Cursor(history)
    >>> cursor.advance([9, 2, 3])
    >>> cursor.length, cursor.following(2)
    (2, [4, 5])
    """

    __slots__ = ("_state", "automaton", "length")

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.length = 0
        self._state = ROOT

    def advance(self, tokens: Iterable[int]) -> None:
        """The other text goes on with these."""
        automaton = self.automaton
        lengths, links = automaton._lengths, automaton._links
        firsts, targets, more = automaton._tokens, automaton._targets, automaton._more
        state, length = self._settled(), self.length
        for token in tokens:
            while True:
                if firsts[state] == token:
                    state = targets[state]
                    length += 1
                    break
                after = more[state].get(token, NONE) if state in more else NONE
                if after != NONE:
                    state = after
                    length += 1
                    break
                if state == ROOT:
                    length = 0
                    break
                state = links[state]
                length = lengths[state]
        self._state, self.length = state, length

    def following(self, most: int, stop: int = NONE) -> list[int]:
        """The tokens that followed that suffix, of late, up to a `stop`."""
        self._state = self._settled()
        if self._state == ROOT:
            return []
        end = self.automaton._ends[self._state]
        found: Sequence[int] = self.automaton.text[end + 1 : end + 1 + most]
        return list(found[: found.index(stop)] if stop in found else found)

    @property
    def branches(self) -> bool:
        """Different tokens followed it."""
        return self._state in self.automaton._more

    def _settled(self) -> int:
        """Its state: a state may have been split since, and then its shorter substrings belong to another."""
        state, lengths, links = self._state, self.automaton._lengths, self.automaton._links
        while state != ROOT and self.length <= lengths[links[state]]:
            state = links[state]
        return state
