"""Setup: what a policy is made from.

Every policy class says itself how it is made from a config (`make`), so a new policy with an option touches its own
file and the option's declaration. Owns nothing; knows the config and the models of time that several policies share.
"""

from dataclasses import dataclass, field
from typing import Self

from shoal.config.engine import EngineConfig
from shoal.core.tiers import Tiers
from shoal.sched.steptime import CopyTimes, StepModel


@dataclass(frozen=True)
class Setup:
    """The config, and what the policies of one scheduler share."""

    config: EngineConfig
    tiers: Tiers = field(default_factory=Tiers)
    steps: StepModel = field(default_factory=StepModel)  # how long passes take
    copies: CopyTimes = field(default_factory=CopyTimes)  # how long copies of blocks take


class NoOptions:
    """A policy that is made without options."""

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls()
