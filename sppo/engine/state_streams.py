"""The copies of a rank's weights and gradients that its program asks for, stage by stage."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from sppo.engine.gradients import GradientProvider
from sppo.engine.streamed_gradients import StreamedGradients
from sppo.engine.streamed_weights import StreamedWeights
from sppo.schedule.actions import Action, ActionKind


@dataclass(frozen=True, slots=True)
class StateStreams:
    """Runs actions of whole stages.

    Attributes:
        weights: None where they are on the device all the time.
        gradients: None where they are.
        provider: gives them to the stages.
        stages: of this rank, each of which is reduced once in a step; those of `provider`.
    """

    weights: StreamedWeights | None = None
    gradients: StreamedGradients | None = None
    provider: GradientProvider | None = None
    stages: Collection[int] = ()
    _reduced: set[int] = field(default_factory=set)

    def run(self, action: Action) -> None:
        """Do what an H2D or D2H of wire "weights" or "gradients" says."""
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
        self.provider.settle()
        self.gradients.leave(stage, complete=stage in self._reduced)

    def reduce(self, stage: int) -> None:
        """Reduce the gradients of a stage, which are complete on this rank; wait behind the last.

        Until then what is under way travels while another stage computes.
        """
        self._reduced.add(stage)
        if self.provider is None:
            return
        self.provider.reduce(stage)
        if len(self._reduced) == len(self.stages):
            self.provider.settle()

    def finish(self) -> None:
        """End a step: nothing is left on the device."""
        self._reduced.clear()
        if self.weights is not None:
            self.weights.forget()
        if self.gradients is not None:
            self.gradients.assert_idle()

    def abort(self) -> None:
        """Free the device: the step failed. Where it no longer answers, all of it stays."""
        self._reduced.clear()
        if self.weights is not None:
            self.weights.abort()
        if self.gradients is not None:
            self.gradients.abort()
