"""Correction of predicted step times by measured ones; the same on all ranks, checkpointed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

from sppo.engine.trace import ExecutedAction
from sppo.parallel.host_collectives import HostCollectives
from sppo.planning.elastic.step_correction import (
    ActionSums,
    CorrectionHistory,
    StepCorrection,
    StepFigures,
)
from sppo.planning.plan import ExecutionPlan
from sppo.schedule.actions import ActionKind
from sppo.schedule.costs import Costs
from sppo.training.steps.planning_ahead import TakenPlan
from sppo.training.steps.step import DoneStep

_log = logging.getLogger(__name__)

_SAVED = "step_correction"
"""Key of the correction history in a checkpoint's metadata."""
_FORWARDS = (ActionKind.F,)
_BACKWARDS = (ActionKind.B, ActionKind.W, ActionKind.KV)


class Corrections:
    """Corrects the predicted times of a run's steps by the measured times of earlier steps.

    The correction of a step is fixed when the step before it begins, because planning of the step
    may begin then.

    Args:
        history: Figures of the steps before.
        plan: Plan of the run.
        peers: Collectives over all ranks, which call :meth:`learn` together.
    """

    def __init__(
        self,
        history: CorrectionHistory,
        *,
        plan: ExecutionPlan,
        peers: HostCollectives,
    ) -> None:
        self._history, self._plan, self._peers = history, plan, peers
        self._current = history.previous

    @property
    def current(self) -> StepCorrection:
        """Correction for the step that begins or runs now."""
        return self._current

    @property
    def following(self) -> StepCorrection:
        """Correction for the step after the one that begins or runs now."""
        return self._history.current

    def learn(self, done: DoneStep, taken: TakenPlan) -> dict[str, Any]:
        """Add the measured times of a step to the history, and return its metrics. Collective.

        Args:
            done: Results of the step on this rank.
            taken: Plan of the step, with the prediction for this rank's replica.
        """
        prediction = taken.replica.prediction
        self._current = self._history.current
        self._history = self._history.after(self._figures(done, taken))
        seconds, step_s, uncorrected_s = self._peers.largest(
            [done.seconds, prediction.step_s, prediction.uncorrected_s]
        )
        correction = prediction.correction
        return {
            "uncorrected_step_s": uncorrected_s,
            "correction_steps": correction.steps,
            "forward_correction": correction.compute.forward,
            "backward_correction": correction.compute.backward,
            "waiting_correction": correction.waiting,
            "predicted_rest_s": prediction.phases_s[-1],
            "prediction_error": step_s / seconds - 1,
        }

    def _figures(self, done: DoneStep, taken: TakenPlan) -> StepFigures:
        """Return the figures of a step over all ranks, bit-identical on each. Collective."""
        prediction = taken.replica.prediction
        own = [
            action_sums(done.result.trace, prediction.uncorrected, kinds=kinds)
            for kinds in (_FORWARDS, _BACKWARDS)
        ]
        totals = self._peers.total(
            [
                *astuple(own[0]),
                *astuple(own[1]),
                done.seconds - done.rest_s,
                prediction.uncorrected_actions_s,
                done.rest_s - taken.wait_s,
                1.0,
            ]
        )
        each = len(fields(ActionSums))
        actions_s, predicted_s, rest_s, count = totals[2 * each :]
        return StepFigures.of(
            ActionSums(*totals[:each]),
            ActionSums(*totals[each : 2 * each]),
            actions=actions_s / predicted_s,
            rest_s=rest_s / count,
        )

    def saved(self) -> dict[str, Any]:
        """Return the history as an entry of a checkpoint's metadata."""
        return {_SAVED: {"of": _key(self._plan), "steps": self._history.as_json()}}


def saved_history(metadata: Mapping[str, Any], *, plan: ExecutionPlan) -> CorrectionHistory:
    """Return the correction history in a checkpoint's metadata.

    The history is empty if the checkpoint has none, or has one of other degrees of parallelism or
    other hardware.

    Args:
        metadata: Metadata of the checkpoint; {} without a checkpoint.
        plan: Plan of the resumed run.
    """
    saved = metadata.get(_SAVED)
    try:
        if saved is not None and saved["of"] == _key(plan):
            return CorrectionHistory.from_json(saved["steps"])
    except (ValueError, KeyError, TypeError) as error:
        _log.warning(
            "predictions begin without correction: %s of the checkpoint: %s", _SAVED, error
        )
    return CorrectionHistory()


def _key(plan: ExecutionPlan) -> dict[str, Any]:
    """Return the hardware and degrees of a plan; measured times apply only if these are equal."""
    hardware = plan.hardware
    return {
        "hardware": f"{hardware.name} ({hardware.provenance})",
        "data_parallel_degree": plan.data_parallel_degree,
        "pipeline_parallel_degree": plan.pipeline_parallel_degree,
        "sequence_parallel_degree": plan.sequence_parallel_degree,
        "sequence_parallel": plan.sequence_parallel,
    }


def action_sums(
    trace: Sequence[ExecutedAction],
    costs: Costs,
    *,
    kinds: Collection[ActionKind],
) -> ActionSums:
    """Return the sums over the actions of some kinds that one rank executed.

    Args:
        trace: Executed actions of the rank.
        costs: Uncorrected costs of all actions.
        kinds: Kinds of compute actions to sum over.
    """
    done = [one for one in trace if one.action.kind in kinds]
    halves = any(one.action.kind == ActionKind.W for one in done)
    seconds = {
        ActionKind.F: costs.forward_s,
        ActionKind.B: costs.backward_s if halves else costs.backward_s + costs.weight_s,
        ActionKind.W: costs.weight_s,
        ActionKind.KV: costs.kv_recompute_s,
    }
    places = {unit: index for index, unit in enumerate(sorted(_units(trace)))}
    return ActionSums(
        sum(one.finish_s - one.start_s for one in done),
        sum(
            float(seconds[one.action.kind][one.action.stage, places[one.action.unit]])
            for one in done
        ),
    )


def _units(trace: Sequence[ExecutedAction]) -> set[tuple[int, int]]:
    """Return the units of a step, each of which every rank runs."""
    return {one.action.unit for one in trace if one.action.kind == ActionKind.F}
