"""Executor of one rank's program, with one handler per kind of action; decides nothing itself.

Tensors wait between actions in :class:`sppo.engine.stage_buffers.StageBuffers`. If an action
fails, the error names the action and shows the program around it.

A message is posted at its SEND or RECV and waited for where it is used. Time spent waiting thus
belongs to no action: it is the gap before the action that waited.
"""

from __future__ import annotations

from collections.abc import Callable

from sppo.engine.providers.gradients import GradientProvider
from sppo.engine.providers.weights import WeightProvider
from sppo.engine.stage_buffers import StageBuffers
from sppo.engine.step_units import StepUnits
from sppo.engine.trace import Stopwatch, Trace
from sppo.parallel.job.peer_errors import peer_errors
from sppo.schedule.actions import Action, ActionKind
from sppo.schedule.schedule import Schedule

_SHOWN_AROUND_FAILURE = 3


class Executor:
    """Runs the program of ``rank`` in ``schedule`` over the stages of this rank.

    Args:
        schedule: Validated schedule of all ranks.
        rank: Pipeline rank whose program to run.
        units: Stages and units of the step.
        buffers: Tensors between stages, and messages.
        weights: Weights of this rank's stages.
        gradients: Gradients of this rank's stages; None for a forward-only program.
        stopwatch: Clock of the actions.

    Raises:
        ValueError: An action of the program has no handler.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        rank: int,
        units: StepUnits,
        buffers: StageBuffers,
        weights: WeightProvider,
        gradients: GradientProvider | None,
        stopwatch: Stopwatch,
    ) -> None:
        self._program, self._training = schedule.programs[rank], schedule.is_training
        self._units, self._buffers, self._stopwatch = units, buffers, stopwatch
        self._weights, self._gradients = weights, gradients
        self._handlers: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.F: self._forward,
            ActionKind.KV: self._recompute_kv,
            ActionKind.B: self._backward,
            ActionKind.W: self._weight_gradients,
            ActionKind.D2H: self._finish_offload,
            ActionKind.H2D: self._start_reload,
            ActionKind.REDUCE: self._reduce,
        }
        if buffers.has_links:
            self._handlers |= {ActionKind.SEND: buffers.send, ActionKind.RECV: buffers.receive}
        self._deferred = {
            (action.stage, action.unit) for action in self._program if action.kind is ActionKind.W
        }
        self._unreduced = {a.stage for a in self._program if a.kind is ActionKind.REDUCE}
        self._loss_scale: float | None = None
        unknown = sorted({str(a.kind) for a in self._program} - {*map(str, self._handlers)})
        if unknown:
            raise ValueError(
                f"schedule {schedule.name!r} has actions {', '.join(unknown)} on rank {rank}; "
                f"this rank runs {', '.join(map(str, self._handlers))} only"
            )

    def run(
        self,
        *,
        loss_scale: float | None,
        before_action: Callable[[int, Action], None] | None,
    ) -> Trace:
        """Execute the program once.

        Args:
            loss_scale: Factor of the summed loss in the gradient; None for a forward-only program.
            before_action: Called with the position and the action before each action, unless None;
                an error that it raises ends the step.

        Returns:
            Executed actions and their times.
        """
        assert self._training == (loss_scale is not None), "training programs need a loss scale"
        self._loss_scale = loss_scale
        trace, mark = Trace(self._stopwatch), self._stopwatch.mark
        for position, action in enumerate(self._program):
            try:
                if before_action is not None:
                    before_action(position, action)
                with peer_errors(f"running {action}"):
                    if action.kind in (ActionKind.F, ActionKind.B):
                        self._buffers.await_input(action)
                        self._units.meet_peers(action)
                    start = mark()
                    self._handlers[action.kind](action)
                trace.add(action, start, mark())
            except BaseException as error:
                error.add_note(self._context(position))
                raise
        self._buffers.wait_all()
        for provider in (self._weights, self._gradients):
            if provider is not None and provider.streamed is not None:
                provider.streamed.end_step()
        return trace

    def _forward(self, action: Action) -> None:
        stage, unit = self._units.of(action)
        output = stage.forward(unit, self._buffers.take(action), loss_scale=self._loss_scale)
        if output is not None:
            self._buffers.put("act", action, output, first=unit.first_token)

    def _backward(self, action: Action) -> None:
        stage, unit = self._units.of(action)
        dx = stage.backward(
            unit,
            self._buffers.take(action),
            defer_weights=(action.stage, action.unit) in self._deferred,
        )
        stage.restore_kv()
        if dx is not None:
            self._buffers.put("grad", action, dx, first=unit.first_token)

    def _recompute_kv(self, action: Action) -> None:
        stage, unit = self._units.of(action)
        stage.recompute_kv(unit)

    def _weight_gradients(self, action: Action) -> None:
        stage, unit = self._units.of(action)
        stage.weight_gradients(unit)

    def _finish_offload(self, action: Action) -> None:
        """Run a D2H; that of saved tensors was started layer by layer, by F."""
        if action.wire == "gradients":
            self._move_gradients(action)

    def _start_reload(self, action: Action) -> None:
        """Run an H2D: permit the unit's layers to return, as far ahead of B as memory allows."""
        if action.wire == "weights":
            assert self._weights.streamed is not None, f"{action} with weights on the device"
            self._weights.streamed.fetch(action.stage)
        elif action.wire == "gradients":
            self._move_gradients(action)
        else:
            stage = self._units.stage(action)
            keys = stage.layout.kv_keys if action.wire == "kv" else stage.layout.saved_keys
            stage.store.permit(keys(action.unit))

    def _move_gradients(self, action: Action) -> None:
        """Start to copy the gradients of a stage to their tier, or back for a later phase."""
        assert self._gradients is not None, f"{action} without gradients"
        streamed = self._gradients.streamed
        assert streamed is not None, f"{action} with gradients on the device"
        if action.kind is ActionKind.H2D:
            streamed.bring_back(action.stage)
            return
        self._gradients.wait_reductions()
        streamed.leave(action.stage, complete=action.stage not in self._unreduced)

    def _reduce(self, action: Action) -> None:
        """Start to reduce a stage's gradients; after the last stage wait for all reductions.

        Reductions overlap the compute of other stages.
        """
        self._unreduced.discard(action.stage)
        assert self._gradients is not None, f"{action} without gradients"
        self._gradients.reduce(action.stage)
        if not self._unreduced:
            self._gradients.wait_reductions()

    def _context(self, position: int) -> str:
        first = max(0, position - _SHOWN_AROUND_FAILURE)
        shown = self._program[first : position + _SHOWN_AROUND_FAILURE + 1]
        names = [
            f">>> {action} <<<" if first + i == position else str(action)
            for i, action in enumerate(shown)
        ]
        return f"failed in action {position + 1} of {len(self._program)}: {' '.join(names)}"
