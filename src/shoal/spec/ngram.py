"""ngram: prompt lookup. What followed the last occurrence of the request's last tokens, in its prompt or its output.

Owns an index of every live request's tokens, by their pairs and triples: two dictionary entries per token, and one look
costs the same however long the request is. Knows no other request's tokens.
"""

from collections.abc import Mapping, Sequence

from shoal.core.drafts import Draft
from shoal.core.request import Request
from shoal.spec.matches import LONGEST, confidence

MOST_TOKENS = 2**19  # indexed tokens of all requests, at some 200 bytes each
FEED = 2048  # tokens of long prompts indexed in one call, so that they do not hold up a pass
FEW = 32  # new tokens of a request that are indexed in any case
ASK_S, READ_S = 5e-6, 7e-7  # of one request, and of one of its tokens
SHIFT = 32  # bits of a token in a key


class Index:
    """Where each pair and triple of tokens ended last, of one request."""

    __slots__ = ("pairs", "seen", "triples")

    def __init__(self) -> None:
        self.pairs: dict[int, int] = {}
        self.triples: dict[int, int] = {}
        self.seen = 0  # tokens whose pair and triple are indexed

    def feed(self, tokens: Sequence[int], upto: int) -> None:
        for place in range(max(self.seen, 1), upto):
            pair = tokens[place - 1] << SHIFT | tokens[place]
            self.pairs[pair] = place
            if place > 1:
                self.triples[tokens[place - 2] << 2 * SHIFT | pair] = place
        self.seen = upto

    def match(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """(place where it ended, how long it is) of an earlier occurrence of the last tokens. The last pair and triple
        themselves are not indexed yet."""
        last = len(tokens) - 1
        if last < 2:
            return None
        pair = tokens[last - 1] << SHIFT | tokens[last]
        end = self.triples.get(tokens[last - 2] << 2 * SHIFT | pair)
        length = 3
        if end is None:
            end = self.pairs.get(pair)
            length = 2
        if end is None:
            return None
        while length < LONGEST and length <= end and tokens[end - length] == tokens[last - length]:
            length += 1
        return end, length


class NgramDrafter:
    """Proposes what followed the same two or more tokens before."""

    ahead = False
    by_chance = False
    names: Sequence[str] = ("ngram",)

    def __init__(self, most_tokens: int = MOST_TOKENS, feed: int = FEED) -> None:
        self.most_tokens = most_tokens
        self.indexed = 0  # tokens of all live requests
        self._feed = feed
        self._indexes: dict[Request, Index] = {}

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Draft]:
        found, left = {}, self._feed
        for request, most in wanted.items():
            tokens = request.tokens
            index = self._indexes.get(request)
            if index is None:
                index = self._indexes[request] = Index()
            new = len(tokens) - 1 - index.seen
            if new > FEW:
                new = min(new, left)
                left -= new
            new = min(new, self.most_tokens - self.indexed)
            if new > 0:
                self.indexed += new
                index.feed(tokens, index.seen + new)
            if index.seen != len(tokens) - 1 or most < 1:
                continue  # a long prompt is not indexed yet, or memory is full
            match = index.match(tokens)
            if match is not None:
                end, length = match
                drafts = tokens[end + 1 : end + 1 + most]
                found[request] = Draft(drafts, confidence(length, len(drafts)), (("ngram", len(drafts)),))
        return found

    def cost_s(self, rows: int, tokens: int) -> float:
        return ASK_S * rows + READ_S * tokens

    def ended(self, request: Request, by_itself: bool) -> None:
        index = self._indexes.pop(request, None)
        if index is not None:
            self.indexed -= index.seen
