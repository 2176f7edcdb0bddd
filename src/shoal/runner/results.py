"""From what a pass drew to its StepResult. Both executors, on CPUs and on GPUs, end here.

Owns scripted ends and the reasons of failed rows. Works on host arrays; knows no device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.core.plan import SCRIPTED_END, Ints, StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.request import Logprobs
from shoal.runner.draws import PassDraws

NOT_FINITE = "the model's scores are not finite numbers; its weights may be damaged, or every token is forbidden"
FORBIDDEN = "the grammar allows no token of the model's vocabulary here; change the grammar"

PromptLogprobs = tuple[tuple[int, int, tuple[Logprobs, ...]], ...]
CopiesDone = tuple[tuple[tuple[int, float], ...], tuple[int, ...]]  # what Copier.take returns


class DrawnTokens(NamedTuple):
    """What the draws of a pass gave, on the host."""

    accepted: Ints  # how many tokens each row yields
    tokens: Ints  # of all rows, one row after the other
    best: npt.NDArray[np.float32]  # the best score of each row; not finite: its tokens have no meaning
    logprobs: Sequence[tuple[int, Logprobs]]  # (index into tokens, its logprobs)


NO_TOKENS = DrawnTokens(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32), ())


def step_result(
    plan: StepPlan,
    draws: PassDraws,
    drawn: DrawnTokens,
    ends_at: Ints,
    masks: LateMasks | None,
    copies: CopiesDone,
    prompt_logprobs: PromptLogprobs = (),
    padded: int = 0,
    busy_s: float = 0.0,
) -> StepResult:
    """The result of a pass; ends_at: of every row of the sampler, where its scripted end is (0: it has none)."""
    tokens = drawn.tokens
    scripted = ends_at[draws.rows] == draws.positions
    if scripted.any():
        tokens = np.where(scripted, SCRIPTED_END, tokens)
    return StepResult(
        plan.step,
        draws.rows,
        draws.generations,
        drawn.accepted,
        tokens,
        tuple(drawn.logprobs),
        prompt_logprobs,
        failures(drawn.best, draws.rows, masks),
        *copies,
        padded=padded,
        busy_s=busy_s,
    )


def failures(best: npt.NDArray[np.float32], rows: Ints, masks: LateMasks | None) -> tuple[tuple[int, str], ...]:
    """(index into rows, reason) of the rows whose best score is not finite."""
    finite = np.isfinite(best)
    if finite.all():
        return ()
    masked = set() if masks is None else set(masks.rows[~masks.allowed.any(axis=1)].tolist())
    return tuple(
        (index, FORBIDDEN if int(rows[index]) in masked else NOT_FINITE) for index in np.flatnonzero(~finite).tolist()
    )
