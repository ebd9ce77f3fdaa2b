"""Copies and reductions of a rank's weights and gradients, stage by stage, as programmed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from sppo.engine.providers.gradients import GradientProvider
from sppo.engine.providers.streamed_tensors import StreamedGradients, StreamedWeights
from sppo.schedule.actions import Action, ActionKind


@dataclass(frozen=True, slots=True)
class StateStreams:
    """Runs the actions that concern the weights or gradients of a whole stage.

    Attributes:
        weights: Streamed weights; None if weights stay on the device.
        gradients: Streamed gradients; None if gradients stay on the device.
        provider: Provider of gradients to the stages; None in evaluation.
        stages: Stages of this rank, each of which is reduced once per step.
    """

    weights: StreamedWeights | None = None
    gradients: StreamedGradients | None = None
    provider: GradientProvider | None = None
    stages: Collection[int] = ()
    _reduced: set[int] = field(default_factory=set)

    def run(self, action: Action) -> None:
        """Run an H2D or D2H of wire "weights" or "gradients"."""
        stage = action.stage
        if action.wire == "weights":
            assert self.weights is not None, f"{action} with weights on the device"
            self.weights.fetch(stage)
            return
        assert self.gradients is not None, f"{action} with gradients on the device"
        assert self.provider is not None, "whoever trains has gradients"
        if action.kind is ActionKind.H2D:
            self.gradients.bring_back(stage)
            return
        self.provider.wait_reductions()
        self.gradients.leave(stage, complete=stage in self._reduced)

    def reduce(self, stage: int) -> None:
        """Start to reduce the gradients of a stage; after the last stage wait for all reductions.

        The gradients of the stage must be complete on this rank. Reductions overlap the compute of
        other stages.
        """
        self._reduced.add(stage)
        if self.provider is None:
            return
        self.provider.reduce(stage)
        if len(self._reduced) == len(self.stages):
            self.provider.wait_reductions()

    def finish(self) -> None:
        """End a step: free streamed weights, and assert that all streamed gradients have left.

        The last copies of gradients may be in flight until :meth:`StreamedGradients.arrive`.
        """
        self._reduced.clear()
        if self.weights is not None:
            self.weights.free_device_copies()
        if self.gradients is not None:
            left = self.gradients.names_here
            assert not left, f"gradients left on the device: {left[:3]}"

    def drain(self) -> bool:
        """Wait for the copies of a failed step, and free device memory.

        Returns:
            Whether the device answers; if not, it may still use the memory, which is kept.
        """
        self._reduced.clear()
        for streamed in (self.weights, self.gradients):
            if streamed is not None:
                if not streamed.lane.drain():
                    return False
                streamed.free_device_copies()
        return True
