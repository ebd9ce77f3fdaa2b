"""One rank's place among the stages of a pipeline, and what it needs to talk to the others."""

from __future__ import annotations

from dataclasses import dataclass

from sppo.cost.candidate import layers_of_stages
from sppo.parallel.msp_exchange import MspLinks
from sppo.parallel.pipeline_p2p import PipelineP2P
from sppo.schedule.actions import Placement, Schedule
from sppo.schedule.checks.deadlock import replay
from sppo.schedule.checks.validate import validate
from sppo.schedule.communication import place_messages
from sppo.schedule.costs import Costs
from sppo.schedule.generators import generate


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Which stages a rank runs, by which schedule.

    Attributes:
        schedule: Name of the generator.
        num_ranks: Pipeline ranks.
        rank: This one.
        num_virtual: Stages of every rank.
        courier: Carries tensors to and from neighbours; None on one rank.
        costs: What a schedule that cuts units weighs its choice with, of the step it was planned
            for; equal units and free messages if not given.
        shards: How ranks talk that run pieces of one unit; None where no unit is cut.
    """

    schedule: str = "sppo"
    num_ranks: int = 1
    rank: int = 0
    num_virtual: int = 1
    courier: PipelineP2P | None = None
    costs: Costs | None = None
    shards: MspLinks | None = None

    @property
    def placement(self) -> Placement:
        """Stages on ranks."""
        return Placement(num_ranks=self.num_ranks, num_virtual=self.num_virtual)

    def layers(self, num_layers: int) -> dict[int, range]:
        """Layers of each of this rank's stages."""
        of_stages = self.all_layers(num_layers)
        return {stage: of_stages[stage] for stage in self.placement.stages_of(self.rank)}

    def all_layers(self, num_layers: int) -> tuple[range, ...]:
        """Layers of every stage."""
        return layers_of_stages(num_layers, num_stages=self.placement.num_stages)

    def program(
        self, lengths: tuple[tuple[int, ...], ...], *, forward_only: bool = False
    ) -> Schedule:
        """The schedule of one step, with its messages, proven to end.

        Args:
            lengths: tokens of every subsequence of every sequence.
            forward_only: evaluation.

        Raises:
            ScheduleError: it breaks a rule.
            DeadlockError: its messages would wait for each other.
        """
        schedule = generate(
            # An evaluation is no step that anything was weighed for.
            "sppo" if forward_only and self.schedule == "sppo_msp" else self.schedule,
            num_ranks=self.num_ranks,
            num_virtual=self.num_virtual,
            lengths=lengths,
            forward_only=forward_only,
            costs=self.costs,
        )
        if self.num_ranks == 1:
            return schedule
        schedule = place_messages(schedule)
        validate(schedule)
        replay(schedule)
        return schedule


ALONE = Pipeline()
