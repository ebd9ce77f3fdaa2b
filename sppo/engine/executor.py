"""Walks one rank's program: one handler per kind of action, nothing decided here.

The dictionaries that carry tensors from one action to the next are written once and popped once per
key, and must be empty when the program ends. When an action fails, the error says which one and
shows the program around it.

A message is posted where the program says SEND or RECV and waited for where it is used, so time
spent waiting belongs to no action: it is the gap in front of the one that waited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from sppo.engine.stage import Stage
from sppo.engine.trace import HostStopwatch, Stopwatch, Trace
from sppo.engine.unit import Unit
from sppo.parallel.pipeline_p2p import Arrival, Courier
from sppo.schedule.actions import Action, ActionKind, Schedule, Wire

_SHOWN_AROUND_FAILURE = 3
_Key = tuple[Wire, int, tuple[int, int]]
"""(what, the stage that consumes it, unit)."""

BeforeAction = Callable[[int, Action], None]
"""Called with the position of an action and the action before it begins."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a walk through the program yields."""

    token_losses: dict[tuple[int, int], Tensor]
    """Unscaled loss of each token by (sequence, subsequence), on the last stage."""
    trace: Trace
    """What was executed, and when."""


class Executor:
    """Runs the program of ``rank`` in ``schedule`` over that rank's stages.

    Args:
        schedule: validated.
        rank: whose program to run.
        stages: this rank's stages by stage index.
        courier: carries tensors between ranks; None where a program has no messages.
        reduce: adds up a stage's gradients over the ranks that hold the same stage.
        stopwatch: takes the time of every action; None: the host's clock does.

    Raises:
        ValueError: the program holds actions that this executor has no handler for.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        rank: int,
        stages: Mapping[int, Stage],
        courier: Courier | None = None,
        reduce: Callable[[int], None] | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._program = schedule.programs[rank]
        self._placement, self._rank = schedule.placement, rank
        self._stages, self._reduce_stage = stages, reduce
        self._training = schedule.is_training
        self._stopwatch = stopwatch or HostStopwatch()
        self._handlers: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.W: self._weight_gradients,
            ActionKind.REDUCE: self._reduce,
        }
        self._courier = courier
        if courier is not None:
            self._handlers |= {ActionKind.SEND: self._send, ActionKind.RECV: self._receive}
        self._deferred = {
            (action.stage, action.unit) for action in self._program if action.kind is ActionKind.W
        }
        self._units: Mapping[tuple[int, int], Unit] = {}
        self._loss_scale: float | None = None
        self._losses: dict[tuple[int, int], Tensor] = {}
        self._expected: dict[_Key, Arrival] = {}
        self._ready: dict[_Key, Tensor] = {}
        unknown = sorted({str(a.kind) for a in self._program} - {*map(str, self._handlers)})
        if unknown:
            raise ValueError(
                f"schedule {schedule.name!r} has actions {', '.join(unknown)} on rank {rank}; "
                f"this rank runs {', '.join(map(str, self._handlers))} only"
            )

    def run(
        self,
        units: Mapping[tuple[int, int], Unit],
        *,
        loss_scale: float | None,
        before_action: BeforeAction,
    ) -> StepOutput:
        """Execute the program once.

        Args:
            units: the step's data by (sequence, subsequence).
            loss_scale: factor of the summed loss in the gradient; None for a forward-only program.
            before_action: what it raises gives the step up cleanly.
        """
        assert self._training == (loss_scale is not None), "training programs need a loss scale"
        self._units, self._loss_scale, self._losses = units, loss_scale, {}
        trace, mark = Trace(self._stopwatch), self._stopwatch.mark
        for position, action in enumerate(self._program):
            try:
                before_action(position, action)
                self._await_input(action)
                start = mark()
                self._handlers[action.kind](action)
                trace.add(action, start, mark())
            except BaseException as error:
                error.add_note(self._context(position))
                self._discard()
                raise
        self._finish()
        return StepOutput(self._losses, trace)

    def _await_input(self, action: Action) -> None:
        """Wait for what F or B needs from another rank."""
        if action.kind not in (ActionKind.F, ActionKind.B):
            return
        key = self._input_key(action)
        if key in self._expected:
            self._ready[key] = self._expected.pop(key).wait()

    def _forward(self, action: Action) -> None:
        unit, stage = self._units[action.unit], self._stages[action.stage]
        x = self._ready.pop(self._input_key(action), None)
        output = stage.forward(unit, x, loss_scale=self._loss_scale)
        if output is not None:
            self._ready["act", action.stage + 1, action.unit] = output
        else:
            self._losses[action.unit] = stage.pop_losses(*action.unit)
        if not self._training and unit.span.end == unit.span.length:
            stage.release_sequence(unit.sequence)

    def _backward(self, action: Action) -> None:
        dy = self._ready.pop(self._input_key(action), None)
        deferred = (action.stage, action.unit) in self._deferred
        stage = self._stages[action.stage]
        dx = stage.backward(self._units[action.unit], dy, defer_weights=deferred)
        if dx is not None:
            self._ready["grad", action.stage - 1, action.unit] = dx

    def _weight_gradients(self, action: Action) -> None:
        self._stages[action.stage].weight_gradients(self._units[action.unit])

    def _send(self, action: Action) -> None:
        """``action`` names the stage that made the tensor."""
        assert self._courier is not None, "no handler without one"
        assert action.wire is not None, "a message carries something"
        consumer = action.stage + (1 if action.wire == "act" else -1)
        self._courier.send(
            self._ready.pop((action.wire, consumer, action.unit)),
            receiver=self._placement.rank_of(consumer),
            what=str(action),
        )

    def _receive(self, action: Action) -> None:
        """``action`` names the stage that consumes the tensor."""
        assert self._courier is not None, "no handler without one"
        assert action.wire is not None, "a message carries something"
        producer = action.stage - (1 if action.wire == "act" else -1)
        sender, stage = self._placement.rank_of(producer), self._stages[action.stage]
        self._expected[action.wire, action.stage, action.unit] = self._courier.receive(
            (self._units[action.unit].tokens_C.shape[0], stage.model.hidden_size),
            dtype=stage.dtype,
            sender=sender,
            what=f"{action} from pipeline rank {sender}",
        )

    def _reduce(self, action: Action) -> None:
        if self._reduce_stage is not None:
            self._reduce_stage(action.stage)

    def _input_key(self, action: Action) -> _Key:
        """Where the input of an F or B that comes from a neighbour waits."""
        wire: Wire = "act" if action.kind is ActionKind.F else "grad"
        return wire, action.stage, action.unit

    def _finish(self) -> None:
        if self._courier is not None:
            self._courier.settle()
        left = [f"{wire} of unit {unit} for stage {stage}" for wire, stage, unit in self._ready]
        left += [f"a message: {key}" for key in self._expected]
        assert not left, f"left over after the step: {', '.join(left)}"
        for stage in self._stages.values():
            stage.assert_idle()

    def _discard(self) -> None:
        self._ready.clear()
        self._expected.clear()
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
