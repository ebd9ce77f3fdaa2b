"""One rank's part of a pipeline: its position, its plan, and its links to other ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sppo.activations.subsequence_placement import PlacementOf
from sppo.config.model import ModelConfig
from sppo.cost.stage_layers import layers_of_stages
from sppo.parallel.megatron import MegatronSequenceParallel
from sppo.parallel.msp_exchange import MspLinks
from sppo.parallel.pipeline_p2p import PipelineLinks
from sppo.parallel.ulysses import UlyssesAllToAll
from sppo.schedule.actions import Placement
from sppo.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One rank's part of a pipeline.

    Placements of all stages of all ranks must be given, because every rank must make the same
    program.

    Attributes:
        schedule: Name of the schedule, see :mod:`sppo.schedule.program`.
        num_ranks: Number of pipeline ranks.
        rank: Pipeline rank of this process.
        num_virtual: Number of stages on each rank.
        p2p: Pipeline communication with neighbouring stages; None on one rank.
        planned: Program of the planned step; None without a plan, as in tests.
        placements: Rows to retain, offload and recompute, by stage; None for the engine's policy.
        kv_offloaded: Stages whose K and V leave the device between forward and backward.
        kv_recomputed: Stages that recompute K and V before their backward; their layers retain
            their inputs.
        recomputes_windows: Whether stages that retain K and V recompute those of layers with a
            sliding window in backward; never with MSP.
        msp_links: Communicators of MSP groups; None if no unit is cut.
        input_every: Layers per saved layer input, see :class:`sppo.engine.stage.Stage`.
        exchange: Communication with the ranks that hold the other tokens of every subsequence; a
            :class:`MegatronSequenceParallel` if they hold other shards of the weights, too. None if
            this rank holds all tokens.
    """

    schedule: str = "sppo"
    num_ranks: int = 1
    rank: int = 0
    num_virtual: int = 1
    p2p: PipelineLinks | None = None
    planned: Schedule | None = None
    placements: Mapping[int, PlacementOf] | None = None
    kv_offloaded: Collection[int] = ()
    kv_recomputed: Collection[int] = ()
    recomputes_windows: bool = False
    msp_links: MspLinks | None = None
    input_every: int = 1
    exchange: UlyssesAllToAll | MegatronSequenceParallel | None = None

    @property
    def placement(self) -> Placement:
        """Assignment of stages to ranks."""
        return Placement(num_ranks=self.num_ranks, num_virtual=self.num_virtual)

    @property
    def member(self) -> int:
        """Index of this rank among the ranks over which the tokens of every unit are sharded."""
        return 0 if self.exchange is None else self.exchange.rank

    def layers(self, model: ModelConfig) -> dict[int, range]:
        """Return the layers of each stage of this rank, by stage."""
        of_stages = self.all_layers(model)
        return {stage: of_stages[stage] for stage in self.placement.stages_of(self.rank)}

    def all_layers(self, model: ModelConfig) -> tuple[range, ...]:
        """Return the layers of every stage of the pipeline."""
        return layers_of_stages(model, num_ranks=self.num_ranks, num_virtual=self.num_virtual)


ALONE = Pipeline()
