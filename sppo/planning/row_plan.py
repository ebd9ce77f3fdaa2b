"""What happens to the saved tensors of each subsequence, for sequences however they are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sppo.activations.placement import CLASSES
from sppo.activations.policy import classes_retained
from sppo.planning.plan import SubsequencePlan


class RowPlan(Protocol):
    """Decides for one stage."""

    def subsequences(self, lengths: tuple[int, ...]) -> tuple[SubsequencePlan, ...]:
        """Rows kept, moved and rebuilt of each subsequence of a sequence cut into ``lengths``."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyRows:
    """A policy that moves nothing, for any cuts."""

    policy: str

    def subsequences(self, lengths: tuple[int, ...]) -> tuple[SubsequencePlan, ...]:
        """See :class:`RowPlan`."""
        retained_classes = classes_retained(self.policy)
        plans = []
        for tokens in lengths:
            x_in, attention, linear = (
                tokens * (index in retained_classes) for index in range(len(CLASSES))
            )
            plans.append(
                SubsequencePlan(
                    retained=(x_in, attention, linear),
                    offloaded=(0, 0, 0),
                    recomputed=(tokens - x_in, tokens - attention, tokens - linear),
                )
            )
        return tuple(plans)


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """One stage of a plan, for sequences cut as it says."""

    planned: tuple[SubsequencePlan, ...]

    def subsequences(self, lengths: tuple[int, ...]) -> tuple[SubsequencePlan, ...]:
        """See :class:`RowPlan`."""
        found = tuple(
            plan.retained[0] + plan.offloaded[0] + plan.recomputed[0] for plan in self.planned
        )
        assert found == lengths, f"the plan is for subsequences of {found}, not {lengths} tokens"
        return self.planned
