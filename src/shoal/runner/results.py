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
from shoal.runner.verify import AcceptedTokens

NOT_FINITE = "the model's scores are not finite numbers; its weights may be damaged, or every token is forbidden"
FORBIDDEN = "the grammar or the token rules allow no token of the model's vocabulary here; change them"

PromptLogprobs = tuple[tuple[int, int, tuple[Logprobs, ...]], ...]
CopiesDone = tuple[tuple[tuple[int, float], ...], tuple[int, ...]]  # what Copier.take returns


class DrawnTokens(NamedTuple):
    """What the draws of a pass gave, on the host: one entry per line."""

    tokens: Ints
    best: npt.NDArray[np.float32]  # the best score; not finite: the token has no meaning
    logprobs: Sequence[tuple[int, Logprobs]]  # (line, its logprobs), ascending


NO_TOKENS = DrawnTokens(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32), ())


def step_result(
    plan: StepPlan,
    draws: PassDraws,
    drawn: DrawnTokens,
    accepted: AcceptedTokens,
    ends_at: Ints,
    masks: LateMasks | None,
    copies: CopiesDone,
    prompt_logprobs: PromptLogprobs = (),
    padded: int = 0,
    busy_s: float = 0.0,
    cold: bool = False,
) -> StepResult:
    """The result of a pass; ends_at: of every row of the sampler, where its scripted end is (0: it has none)."""
    lines, tokens = accepted.lines, accepted.tokens
    scripted = ends_at[draws.line_rows[lines]] == draws.positions[lines]
    if scripted.any():
        tokens = np.where(scripted, SCRIPTED_END, tokens)
    logprobs = drawn.logprobs
    if draws.has_drafts and logprobs:
        index = {line: number for number, line in enumerate(lines.tolist())}
        logprobs = [(index[line], one) for line, one in logprobs if line in index]
    return StepResult(
        plan.step,
        draws.rows,
        draws.generations,
        accepted.counts,
        tokens,
        tuple(logprobs),
        prompt_logprobs,
        failures(draws.first_lines, drawn.best, masks),
        *copies,
        padded=padded,
        busy_s=busy_s,
        cold=cold,
    )


def failures(lines: Ints, best: npt.NDArray[np.float32], masks: LateMasks | None) -> tuple[tuple[int, str], ...]:
    """(index into these lines, reason) of those whose best score is not finite; best: of all lines."""
    finite = np.isfinite(best[lines])
    if finite.all():
        return ()
    empty = set() if masks is None else set(masks.lines[~masks.allowed.any(axis=1)].tolist())
    broken = np.flatnonzero(~finite).tolist()
    return tuple((index, FORBIDDEN if int(lines[index]) in empty else NOT_FINITE) for index in broken)
