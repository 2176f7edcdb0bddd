"""Make: the drafter that `--speculate` names. Owns the table of drafters; a new one is a line here and its file.

A drafter that needs more than its name (a draft model needs weights and a device) is handed in by the caller.
"""

from collections.abc import Callable, Mapping

from shoal.config.speculate import Speculate
from shoal.core.drafts import Drafter, NoDrafter
from shoal.core.names import pick
from shoal.spec.combined import Combined
from shoal.spec.grammar import GrammarDrafter
from shoal.spec.ngram import NgramDrafter
from shoal.spec.suffix import SuffixDrafter
from shoal.spec.synthetic import SyntheticDrafter

MakeDrafter = Callable[[], Drafter]
DRAFTERS: dict[str, MakeDrafter] = {"ngram": NgramDrafter, "suffix": SuffixDrafter, "grammar": GrammarDrafter}


def make_drafter(speculate: Speculate, more: Mapping[str, MakeDrafter] | None = None) -> Drafter:
    """The drafter, or several as one. `more`: drafters that this room cannot make itself.

    >>> make_drafter(Speculate.read("grammar+suffix")).names
    ('grammar', 'suffix')
    """
    if speculate.synthetic is not None:
        return SyntheticDrafter(speculate.synthetic)
    table = {**DRAFTERS, **(more or {})}
    drafters = [pick(table, name, "drafter")() for name in speculate.drafters]
    if len(drafters) > 1:
        return Combined(drafters)
    return drafters[0] if drafters else NoDrafter()
