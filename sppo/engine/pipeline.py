"""One rank's place among the stages of a pipeline, and what it needs to talk to the others."""

from __future__ import annotations

from dataclasses import dataclass

from sppo.cost.candidate import layers_of_stages
from sppo.parallel.msp_exchange import MspLinks
from sppo.parallel.pipeline_p2p import PipelineP2P
from sppo.schedule.actions import Placement, Schedule


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages that a rank runs, and the schedule by which it runs them.

    Attributes:
        schedule: Name of the generator.
        num_ranks: Pipeline ranks.
        rank: This one.
        num_virtual: Stages of every rank.
        p2p: Carries tensors to and from neighbours; None on one rank.
        planned: The program of the step that was planned; None if none was, as in tests.
        msp_links: Connects the ranks of MSP groups; None if no unit is cut.
    """

    schedule: str = "sppo"
    num_ranks: int = 1
    rank: int = 0
    num_virtual: int = 1
    p2p: PipelineP2P | None = None
    planned: Schedule | None = None
    msp_links: MspLinks | None = None

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


ALONE = Pipeline()
