"""Make: the drafter that `--speculate` names. Owns the table of drafters; a new one is a line here and its file.

The draft model is not among them: it needs weights and a device, and the scheduler asks it apart from the others.
"""

from collections.abc import Callable

from shoal.config.speculate import MODEL, Speculate
from shoal.core.drafts import Drafter, NoDrafter
from shoal.core.names import pick
from shoal.spec.combined import Combined
from shoal.spec.grammar import GrammarDrafter
from shoal.spec.ngram import NgramDrafter
from shoal.spec.suffix import SuffixDrafter
from shoal.spec.synthetic import SyntheticDrafter

MakeDrafter = Callable[[], Drafter]
DRAFTERS: dict[str, MakeDrafter] = {"ngram": NgramDrafter, "suffix": SuffixDrafter, "grammar": GrammarDrafter}


def make_drafter(speculate: Speculate) -> Drafter:
    """The drafter, or several as one, without the draft model.

    >>> make_drafter(Speculate.read("grammar+suffix+draft")).names
    ('grammar', 'suffix')
    """
    if speculate.synthetic is not None:
        return SyntheticDrafter(speculate.synthetic)
    drafters = [pick(DRAFTERS, name, "drafter")() for name in speculate.drafters if name != MODEL]
    if len(drafters) > 1:
        return Combined(drafters)
    return drafters[0] if drafters else NoDrafter()
