"""Walks one rank's program: one handler per kind of action, nothing decided here.

The dictionaries that carry tensors from one action to the next are written once and popped once per
key, and must be empty when the program ends. When an action fails, the error says which one and
shows the program around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from sppo.engine.stage import Stage
from sppo.engine.unit import Unit
from sppo.schedule.actions import Action, ActionKind, Schedule

_SHOWN_AROUND_FAILURE = 3


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a walk through the program yields on the last stage."""

    token_losses: dict[tuple[int, int], Tensor]
    """Unscaled loss of each token by (sequence, subsequence)."""
    seconds: dict[ActionKind, float]
    """Host time spent in the handlers of each kind; on a CPU that is the time of the work."""


class Executor:
    """Runs the program of ``rank`` in ``schedule`` over that rank's stages.

    Args:
        schedule: validated.
        rank: whose program to run.
        stages: this rank's stages by stage index.

    Raises:
        ValueError: the program holds actions that this executor has no handler for.
    """

    def __init__(self, schedule: Schedule, *, rank: int, stages: Mapping[int, Stage]) -> None:
        self._program = schedule.programs[rank]
        self._stages = stages
        self._training = schedule.is_training
        self._handlers: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.REDUCE: self._reduce,
        }
        self._units: Mapping[tuple[int, int], Unit] = {}
        self._loss_scale: float | None = None
        self._losses: dict[tuple[int, int], Tensor] = {}
        unknown = sorted({str(a.kind) for a in self._program} - {*map(str, self._handlers)})
        if unknown:
            raise ValueError(
                f"schedule {schedule.name!r} has actions {', '.join(unknown)} on rank {rank}; "
                f"a single rank without copies runs {', '.join(map(str, self._handlers))} only"
            )

    def run(
        self,
        units: Mapping[tuple[int, int], Unit],
        *,
        loss_scale: float | None,
        before_action: Callable[[], None],
    ) -> StepOutput:
        """Execute the program once.

        Args:
            units: the step's data by (sequence, subsequence).
            loss_scale: factor of the summed loss in the gradient; None for a forward-only program.
            before_action: called before every action; what it raises gives the step up cleanly.
        """
        assert self._training == (loss_scale is not None), "training programs need a loss scale"
        self._units, self._loss_scale, self._losses = units, loss_scale, {}
        seconds = dict.fromkeys(self._handlers, 0.0)
        for position, action in enumerate(self._program):
            try:
                before_action()
                start = time.perf_counter()
                self._handlers[action.kind](action)
                seconds[action.kind] += time.perf_counter() - start
            except BaseException as error:
                error.add_note(self._context(position))
                self._discard()
                raise
        for stage in self._stages.values():
            stage.assert_idle()
        return StepOutput(self._losses, seconds)

    def _forward(self, action: Action) -> None:
        unit, stage = self._units[action.unit], self._stages[action.stage]
        output = stage.forward(unit, None, loss_scale=self._loss_scale)
        assert output is None, "on one rank the last stage is the only one"
        self._losses[action.unit] = stage.pop_losses(*action.unit)
        if not self._training and unit.span.end == unit.span.length:
            stage.release_sequence(unit.sequence)

    def _backward(self, action: Action) -> None:
        self._stages[action.stage].backward(self._units[action.unit], None)

    def _reduce(self, action: Action) -> None:
        """Gradients of a single data-parallel rank are already whole."""

    def _discard(self) -> None:
        for stage in self._stages.values():
            stage.discard()

    def _context(self, position: int) -> str:
        first = max(0, position - _SHOWN_AROUND_FAILURE)
        shown = self._program[first : position + _SHOWN_AROUND_FAILURE + 1]
        words = [
            f">>> {action} <<<" if first + i == position else str(action)
            for i, action in enumerate(shown)
        ]
        return f"failed in action {position} of {len(self._program)}: {' '.join(words)}"
