"""Policies: one choice per axis. Owns nothing; the axes do not know each other."""

from dataclasses import dataclass, field

from shoal.core.tiers import Tiers
from shoal.sched.batching import Batching
from shoal.sched.budget import Budget, Fixed
from shoal.sched.drafts import DraftPolicy, NoDrafts
from shoal.sched.lanes import Headroom, Lanes
from shoal.sched.layout import Layout
from shoal.sched.memory import Memory
from shoal.sched.order import Order
from shoal.sched.preempt import Preempt
from shoal.sched.prefill import Prefill
from shoal.sched.steptime import CopyTimes, StepModel


@dataclass(frozen=True)
class Policies:
    """One choice per axis."""

    batching: Batching
    layout: Layout
    prefill: Prefill
    memory: Memory
    order: Order
    preempt: Preempt
    budget: Budget = field(default_factory=Fixed)
    lanes: Lanes = field(default_factory=Lanes)
    headroom: Headroom = field(default_factory=Headroom)
    tiers: Tiers = field(default_factory=Tiers)
    steps: StepModel = field(default_factory=StepModel)  # how long passes take, for policies that need to know
    copies: CopyTimes = field(default_factory=CopyTimes)  # … and copies of blocks
    drafts: DraftPolicy = field(default_factory=NoDrafts)

    @property
    def learns(self) -> bool:
        """Some policy needs to know how long passes take."""
        late = any(tier.reject_late for tier in self.tiers)
        return self.budget.learns or self.preempt.learns or self.drafts.on or late or len(self.tiers) > 1
