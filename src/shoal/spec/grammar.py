"""grammar: the tokens that a request's grammar forces.

Where a grammar leaves no choice of the next bytes (the keys of a JSON schema), their usual tokens are drafted. They are
verified like any draft: a model may spell the same bytes in other tokens, and what is drawn is what counts. Owns
nothing; knows grammars by their port only.
"""

from collections.abc import Mapping, Sequence

from shoal.core.drafts import Draft
from shoal.core.request import Request

ASK_S = 8e-5  # of one request with a grammar
SURE = 0.97  # that the model spells forced bytes in the usual tokens


class GrammarDrafter:
    """Proposes what the grammar forces."""

    ahead = False
    by_chance = False
    names: Sequence[str] = ("grammar",)

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Draft]:
        found = {}
        for request, most in wanted.items():
            grammar = request.grammar
            if grammar is None or most < 1:
                continue
            tokens = grammar.forced()[:most]
            if tokens:
                found[request] = Draft(tokens, (SURE,) * len(tokens), (("grammar", len(tokens)),))
        return found

    def cost_s(self, rows: int, tokens: int) -> float:
        return ASK_S * rows

    def ended(self, request: Request, by_itself: bool) -> None:
        pass
