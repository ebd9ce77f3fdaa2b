"""Executor of one rank's program, with one handler per kind of action; decides nothing itself.

Tensors wait between actions in :class:`sppo.engine.stage_buffers.StageBuffers`. If an action
fails, the error names the action and shows the program around it.

A message is posted at its SEND or RECV and waited for where it is used. Time spent waiting thus
belongs to no action: it is the gap before the action that waited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sppo.engine.msp.executor import MspExecutor
from sppo.engine.providers.state_streams import StateStreams
from sppo.engine.stage import Stage
from sppo.engine.stage_buffers import LocalTokens, StageBuffers
from sppo.engine.trace import HostStopwatch, Stopwatch, Trace
from sppo.engine.unit import Unit
from sppo.parallel.pipeline_p2p import PipelineLinks
from sppo.schedule.actions import WHOLE_STAGE_ACTIONS, Action, ActionKind
from sppo.schedule.schedule import Schedule

_SHOWN_AROUND_FAILURE = 3


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Losses and trace of one run of the program."""

    token_losses: dict[tuple[int, int], Tensor]
    """Unscaled loss of each token by (sequence, subsequence); empty without the last stage."""
    trace: Trace
    """Executed actions and their times."""


class Executor:
    """Runs the program of ``rank`` in ``schedule`` over the stages of this rank.

    Args:
        schedule: Validated schedule of all ranks.
        rank: Pipeline rank whose program to run.
        stages: Stages of this rank by stage index.
        p2p: Pipeline communication; None if the program has no messages.
        state: Copies and reductions of weights and gradients of whole stages.
        msp: Runner of this rank's MSP shards; None if no unit is cut.
        stopwatch: Clock of the actions; None uses the host's clock.

    Raises:
        ValueError: An action of the program has no handler.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        rank: int,
        stages: Mapping[int, Stage],
        p2p: PipelineLinks | None = None,
        state: StateStreams | None = None,
        msp: MspExecutor | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._program = schedule.programs[rank]
        self._buffers = StageBuffers(schedule, rank=rank, p2p=p2p)
        self._msp = msp
        self._stages, self._state = stages, state or StateStreams()
        self._training = schedule.is_training
        self._stopwatch = stopwatch or HostStopwatch()
        self._handlers: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.F: self._forward,
            ActionKind.KV: self._recompute_kv,
            ActionKind.B: self._backward,
            ActionKind.W: self._weight_gradients,
            ActionKind.D2H: self._finish_offload,
            ActionKind.H2D: self._start_reload,
            ActionKind.REDUCE: self._reduce,
        }
        if p2p is not None:
            self._handlers |= {ActionKind.SEND: self._send, ActionKind.RECV: self._receive}
        self._deferred = {
            (action.stage, action.unit) for action in self._program if action.kind is ActionKind.W
        }
        self._units: Mapping[tuple[int, int], Unit] = {}
        self._loss_scale: float | None = None
        self._losses: dict[tuple[int, int], Tensor] = {}
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
        before_action: Callable[[int, Action], None],
        on_failure: Callable[[BaseException], None],
    ) -> StepOutput:
        """Execute the program once.

        Args:
            units: Data of the step by (sequence, subsequence).
            loss_scale: Factor of the summed loss in the gradient; None for a forward-only program.
            before_action: Called with the position and the action before each action; an error
                that it raises ends the step.
            on_failure: Called with the error that ends the step, before the engine drains its
                lanes, which may wait for a device that no longer answers.

        Returns:
            Losses and trace of the step.
        """
        assert self._training == (loss_scale is not None), "training programs need a loss scale"
        self._units, self._loss_scale, self._losses = units, loss_scale, {}
        self._begin()
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
                on_failure(error)
                raise
        self._finish()
        return StepOutput(self._losses, trace)

    def _begin(self) -> None:
        tokens = _own_tokens(self._units) if self._msp is None else self._msp.tokens
        self._buffers.begin(tokens)

    def _await_input(self, action: Action) -> None:
        """Wait for the input of F or B from other ranks; for a shard, also for its MSP group."""
        if action.kind not in (ActionKind.F, ActionKind.B):
            return
        self._buffers.await_input(action)
        if action.num_shards > 1:
            assert self._msp is not None, "a program with shards has an MSP executor"
            self._msp.barrier(action)

    def _forward(self, action: Action) -> None:
        stage, unit, first = self._work(action)
        output = stage.forward(unit, self._buffers.take(action), loss_scale=self._loss_scale)
        own_stage = self._stages.get(action.stage)
        if output is not None:
            self._buffers.put("act", action, output, first=first)
        elif own_stage is not None:  # not a borrower of the last stage
            self._losses[action.unit] = own_stage.pop_losses(*action.unit)
        if not self._training and own_stage is not None and unit.span.end == unit.span.length:
            own_stage.release_sequence(unit.sequence)

    def _backward(self, action: Action) -> None:
        stage, unit, first = self._work(action)
        deferred = (action.stage, action.unit) in self._deferred
        dx = stage.backward(
            unit,
            self._buffers.take(action),
            defer_weights=deferred,
            restore_kv=partial(self._restore_kv, stage),
        )
        if action.num_shards == 1:
            self._restore_kv(stage)
        if dx is not None:
            self._buffers.put("grad", action, dx, first=first)

    def _recompute_kv(self, action: Action) -> None:
        self._stages[action.stage].recompute_kv(self._units[action.unit])

    def _work(self, action: Action) -> tuple[Stage, Unit, int]:
        """Return the stage, the unit (or shard), and its first token on this rank, of an F or B."""
        stage = self._stage_of(action)
        if action.num_shards == 1:
            return stage, self._units[action.unit], 0
        assert self._msp is not None, "a program with shards has an MSP executor"
        shard = self._msp.shard(action)
        return stage, shard, shard.first_token

    def _weight_gradients(self, action: Action) -> None:
        self._stages[action.stage].weight_gradients(self._units[action.unit])

    def _send(self, action: Action) -> None:
        self._buffers.send(action)

    def _receive(self, action: Action) -> None:
        width, dtype = self._message
        self._buffers.receive(action, width=width, dtype=dtype)

    def _finish_offload(self, action: Action) -> None:
        """Run a D2H; that of saved tensors was started layer by layer, by F."""
        if (action.kind, action.wire) in WHOLE_STAGE_ACTIONS:
            self._state.run(action)

    def _start_reload(self, action: Action) -> None:
        """Run an H2D: permit the unit's layers to return, as far ahead of B as memory allows."""
        if (action.kind, action.wire) in WHOLE_STAGE_ACTIONS:
            self._state.run(action)
            return
        stage = self._stage_of(action)
        keys = stage.layout.kv_keys if action.wire == "kv" else stage.layout.saved_keys
        stage.store.permit(keys(action.unit))

    def _restore_kv(self, stage: Stage) -> None:
        """Restore the K and V, of any stage of the rank, whose blocks are the next to be used."""
        while (key := stage.store.next_kv) is not None:
            stage.restore_kv(key, self._units[key.sequence, key.subsequence].span)

    def _stage_of(self, action: Action) -> Stage:
        if action.num_shards == 1:
            return self._stages[action.stage]
        assert self._msp is not None, "a program with shards has an MSP executor"
        return self._msp.stage(action)

    def _reduce(self, action: Action) -> None:
        self._state.reduce(action.stage)

    @property
    def _message(self) -> tuple[int, torch.dtype]:
        """Elements per token and dtype of messages between stages."""
        stage = next(iter(self._stages.values()))
        return stage.model.hidden_size, stage.dtype

    def _finish(self) -> None:
        self._buffers.wait_all()
        if self._msp is not None:
            self._msp.assert_idle()
        for stage in self._stages.values():
            stage.assert_idle()
        self._state.finish()

    def _context(self, position: int) -> str:
        first = max(0, position - _SHOWN_AROUND_FAILURE)
        shown = self._program[first : position + _SHOWN_AROUND_FAILURE + 1]
        names = [
            f">>> {action} <<<" if first + i == position else str(action)
            for i, action in enumerate(shown)
        ]
        return f"failed in action {position + 1} of {len(self._program)}: {' '.join(names)}"


def _own_tokens(units: Mapping[tuple[int, int], Unit]) -> LocalTokens:
    """Return `LocalTokens` of a step without MSP: messages have all of a rank's tokens, or none."""
    return lambda unit, end: units[unit].tokens_C.shape[0] if end else 0
