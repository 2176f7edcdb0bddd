"""suffix: what followed the longest end of a request's text that occurs before, in its own prompt and output or in
recent answers to the same tenant.

    request   ── its own automaton: the last tokens of its prompt, and its output
        └───── a cursor into each generation of its tenant's answers
    tenant    ── old │ young     answers are added to the young generation; when that is full the old one is forgotten,
                                 and the young one takes its place

Owns these automata and their memory: so many tokens in all, of which histories are evicted first, beginning with the
tenant that was asked for least recently. Each committed token is read once, amortised O(1); a call reads a limited
number of them, so that a long prompt does not hold up a pass. Tenants never see each other's tokens, nor does a request
with another salt.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

from shoal.core.drafts import Draft
from shoal.core.request import Request
from shoal.spec.automaton import Automaton, Cursor
from shoal.spec.matches import LONGEST, confidence

MOST_TOKENS = 2**19  # in all automata, at some 150 bytes each
OWN_TOKENS = 2**15  # of one request: the last of its prompt and all that follow
MOST_HISTORIES = 1024  # tenants and salts
HISTORY_TOKENS = 2**14  # of one tenant's answers, in both generations
ANSWER_TOKENS = 2**12  # of one answer: its beginning
UNREAD_TOKENS = 2**13  # of answers that wait to be read: while no request is asked for, the oldest are dropped
FEED = 512  # tokens of answers and of long prompts read in one call
FEW = 32  # new tokens of a request that are read in any case
ASK_S, READ_S = 1e-5, 4e-6  # of one request, and of one of its tokens
SEPARATOR = -3  # between two answers; never in a request's tokens

Key = tuple[str, str]


class History:
    """Recent answers of one tenant, in two generations."""

    __slots__ = ("generations", "most")

    def __init__(self, most: int) -> None:
        self.most = most  # tokens of one generation
        self.generations: deque[Automaton] = deque([Automaton()], maxlen=2)

    def __len__(self) -> int:
        return sum(map(len, self.generations))

    def add(self, tokens: Sequence[int]) -> None:
        """Add an answer."""
        tokens = tokens[: self.most - 1]
        if 0 < len(self.generations[-1]) >= self.most - len(tokens):
            self.generations.append(Automaton())
        self.generations[-1].extend([*tokens, SEPARATOR])


class Reader:
    """One live request: how far it is read, its own automaton, and its places in its tenant's history."""

    __slots__ = ("cursors", "own", "read")

    def __init__(self, read: int) -> None:
        self.read = read  # tokens of the request
        self.own = Automaton()
        self.cursors: list[Cursor] = []

    def follow(self, history: History | None, tokens: Sequence[int], upto: int) -> None:
        """Read on to here."""
        fresh = tokens[self.read : upto]
        self.own.extend(fresh)
        self.read = upto
        if history is not None and (not self.cursors or len(fresh) > LONGEST):
            self.cursors = [Cursor(one) for one in history.generations]
            fresh = tokens[max(0, upto - LONGEST) : upto]
        for cursor in self.cursors:
            cursor.advance(fresh)

    def draft(self, most: int) -> Draft | None:
        """What followed the longest match; of equal ones (all beyond LONGEST are) the request's own, then the latest.
        Where an answer of the history ended, the request's own text goes on."""
        own = self.own
        length, branches = min(own.length, LONGEST), own.branches
        tokens: list[int] = []
        best: Cursor | None = None
        for cursor in reversed(self.cursors):
            if cursor.length > length:
                length, best = min(cursor.length, LONGEST), cursor
        if best is not None:
            tokens, branches = best.following(most, SEPARATOR), best.branches
        if not tokens and own.length:
            length, branches = own.length, own.branches
            tokens = own.follow(own.end, most)
        if not tokens:
            return None
        return Draft(tokens, confidence(length, len(tokens), branches), (("suffix", len(tokens)),))


class SuffixDrafter:
    """Proposes what followed the longest match."""

    ahead = False
    by_chance = False
    names: Sequence[str] = ("suffix",)

    def __init__(
        self,
        most_tokens: int = MOST_TOKENS,
        own_tokens: int = OWN_TOKENS,
        history_tokens: int = HISTORY_TOKENS,
        feed: int = FEED,
    ) -> None:
        self.most_tokens, self.own_tokens, self.history_tokens = most_tokens, own_tokens, history_tokens
        self._feed = feed
        self._readers: dict[Request, Reader] = {}
        self._histories: OrderedDict[Key, History] = OrderedDict()  # the least recently asked for comes first
        self._answers: deque[tuple[Key, list[int]]] = deque()  # not read yet
        self._live = self._kept = self._unread = 0  # tokens of readers, histories and unread answers

    @property
    def held(self) -> int:
        """Tokens that it keeps."""
        return self._live + self._kept + self._unread

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Draft]:
        found: dict[Request, Draft] = {}
        left = self._read_answers(self._feed)
        for request, most in wanted.items():
            tokens = request.tokens
            reader = self._readers.get(request)
            if reader is None:
                reader = self._readers[request] = Reader(max(0, len(tokens) - self.own_tokens))
            new = len(tokens) - reader.read
            if new > FEW:
                new = min(new, left)
                left -= new
            if not self._make_room(new):
                new = 0
            self._live += new
            key = request.tenant, request.salt
            if key in self._histories:
                self._histories.move_to_end(key)
            reader.follow(self._histories.get(key), tokens, reader.read + new)
            if reader.read == len(tokens) and most > 0:
                draft = reader.draft(most)
                if draft is not None:
                    found[request] = draft
        return found

    def cost_s(self, rows: int, tokens: int) -> float:
        return ASK_S * rows + READ_S * tokens

    def ended(self, request: Request, by_itself: bool) -> None:
        """Its answer becomes history, unless something else ended it."""
        reader = self._readers.pop(request, None)
        if reader is not None:
            self._live -= len(reader.own)
        if not by_itself:
            return
        answer = request.tokens[request.prompt_len : request.prompt_len + ANSWER_TOKENS]
        self._answers.append(((request.tenant, request.salt), answer))
        self._unread += len(answer)
        while self._answers and (self._unread > UNREAD_TOKENS or not self._make_room(0)):
            self._unread -= len(self._answers.popleft()[1])

    def _read_answers(self, most: int) -> int:
        """Add answers to the histories, about so many tokens of them; returns how many of `most` are left."""
        while self._answers and most > 0:
            key, answer = self._answers.popleft()
            self._unread -= len(answer)
            history = self._histories.get(key)
            if history is None:
                history = self._histories[key] = History(self.history_tokens // 2)
            self._histories.move_to_end(key)
            before = len(history)
            history.add(answer)
            self._drop_cursors(key)
            self._kept += len(history) - before
            most -= len(answer)
            self._make_room(0)
        return max(0, most)

    def _drop_cursors(self, key: Key) -> None:
        """A history has changed: its tenant's requests find their places in it again when they are asked for."""
        for request, reader in self._readers.items():
            if (request.tenant, request.salt) == key:
                reader.cursors = []

    def _make_room(self, tokens: int) -> bool:
        """Forget histories until there is room for so many tokens; False: there is not."""
        while self._histories and (self.held + tokens > self.most_tokens or len(self._histories) > MOST_HISTORIES):
            key, forgotten = self._histories.popitem(last=False)
            self._kept -= len(forgotten)
            self._drop_cursors(key)
        return self.held + tokens <= self.most_tokens

    def check(self) -> None:
        """Its counts are right and its memory is bounded."""
        assert self._live == sum(len(reader.own) for reader in self._readers.values()), (
            "live tokens are counted wrongly"
        )
        assert self._kept == sum(map(len, self._histories.values())), "tokens of histories are counted wrongly"
        assert self._unread == sum(len(answer) for _, answer in self._answers), "unread tokens are counted wrongly"
        assert len(self._histories) <= MOST_HISTORIES, "too many histories are kept"
        assert self.held <= self.most_tokens, "more tokens are kept than there is room for"
        assert all(len(history) <= self.history_tokens for history in self._histories.values()), "a history is too long"
