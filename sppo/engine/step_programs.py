"""Program and placements of a step, as planned, or generated for steps without a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np

from sppo.activations.policy import policy_placement
from sppo.activations.subsequence_placement import SubsequencePlacement
from sppo.engine.pipeline import Pipeline
from sppo.schedule.actions import Lengths
from sppo.schedule.costs import abstract_costs
from sppo.schedule.orders.names import order_of
from sppo.schedule.program import forward_program, generate, with_messages
from sppo.schedule.schedule import Schedule
from sppo.schedule.transfers.copies import place_copies, place_state

_STEPS_KEPT = 8

StepPlacements = Sequence[Sequence[Sequence[SubsequencePlacement]]]
"""Placements of a step, by stage, sequence and subsequence."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Program and placements of one step.

    Attributes:
        program: Schedule of the step.
        placements: Placements of the activations of all stages; empty for a forward-only program.
    """

    program: Schedule
    placements: StepPlacements


class StepPrograms:
    """Cache of the steps of an engine, because generating and checking a program takes time.

    Args:
        pipeline: This rank's part of the pipeline, with the planned program if there is one.
        policy: Activation policy of all stages of a pipeline without placements.
        streams_weights: Whether weights are copied to the device stage by stage.
        streams_gradients: Whether gradients are copied off the device stage by stage.
        forward_only_stages: Number of first stages without a backward in training.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        policy: str,
        streams_weights: bool,
        streams_gradients: bool,
        forward_only_stages: int,
    ) -> None:
        self._pipeline = pipeline
        every_stage = range(pipeline.placement.num_stages)
        self._placements = pipeline.placements or dict.fromkeys(
            every_stage, policy_placement(policy)
        )
        self._streams_weights, self._streams_gradients = streams_weights, streams_gradients
        self._forward_only_stages = forward_only_stages
        # Training steps are alike; only evaluations bring other lengths, a few at a time.
        self._made = lru_cache(maxsize=_STEPS_KEPT)(self._make)

    def step(self, lengths: Lengths, *, forward_only: bool) -> PlannedStep:
        """Return program and placements of a step of sequences cut into ``lengths``."""
        return self._made(lengths, forward_only)

    def _make(self, lengths: Lengths, forward_only: bool) -> PlannedStep:
        pipeline = self._pipeline
        if forward_only:
            forwards = forward_program(
                # The solver chose MSP for training steps.
                order_of(pipeline.schedule, num_virtual=pipeline.num_virtual),
                num_ranks=pipeline.num_ranks,
                num_virtual=pipeline.num_virtual,
                lengths=lengths,
                streams_weights=self._streams_weights,
            )
            return PlannedStep(forwards, ())
        stages = range(pipeline.placement.num_stages)
        placements = [[self._placements[n](parts) for parts in lengths] for n in stages]
        program = pipeline.planned
        if program is None or program.lengths != lengths:
            program = self._equal_units(lengths, placements)
        return PlannedStep(program, placements)

    def _equal_units(self, lengths: Lengths, placements: StepPlacements) -> Schedule:
        """Return a program for units of equal cost."""
        pipeline = self._pipeline
        stages, num_units = pipeline.placement.num_stages, sum(map(len, lengths))
        costs = abstract_costs(stages, num_units=num_units, backward_s=1.0, weight_s=1.0)
        schedule = generate(
            pipeline.schedule,
            num_ranks=pipeline.num_ranks,
            num_virtual=pipeline.num_virtual,
            lengths=lengths,
            forward_only_stages=self._forward_only_stages,
            costs=costs,
        )
        offloaded = [
            [any(part.offloaded) for part in chain.from_iterable(placed)] for placed in placements
        ]
        schedule = place_copies(
            schedule,
            offloaded=np.array(offloaded),
            kv_offloaded=pipeline.kv_offloaded,
            kv_recomputed=pipeline.kv_recomputed,
        )
        schedule = place_state(
            schedule, weights=self._streams_weights, gradients=self._streams_gradients
        )
        return with_messages(schedule, costs=costs)
