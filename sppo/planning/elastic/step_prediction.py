"""Prediction of a planned step by the cost model, plain and corrected by measured steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sppo.cost.correction import UNCORRECTED, CostCorrection
from sppo.cost.stage_cost import stage_seconds
from sppo.planning.elastic.step_correction import StepCorrection
from sppo.planning.elastic.step_plan import StepPlan
from sppo.planning.make_plan import compute_seconds
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.schedule.costs import Costs


@dataclass(frozen=True, slots=True, eq=False)
class StepPrediction:
    """Predicted seconds of one planned step.

    Attributes:
        correction: Correction of the prediction.
        step_s: Corrected seconds of the step.
        phases_s: Corrected seconds of forwards and of backwards of the busiest rank, and outside of
            the program.
        uncorrected_s: Uncorrected seconds of the step.
        uncorrected_actions_s: Uncorrected seconds from the first action of the program to the last.
        uncorrected: Uncorrected costs of the actions.
    """

    correction: StepCorrection
    step_s: float
    phases_s: tuple[float, float, float]
    uncorrected_s: float
    uncorrected_actions_s: float
    uncorrected: Costs


def predict_step(plan: StepPlan, correction: StepCorrection) -> StepPrediction:
    """Return the prediction for a plan, which may have been made with another correction."""
    plain = _priced(plan.evaluated, UNCORRECTED)
    corrected = _priced(plan.evaluated, correction.compute)
    rest_s = plain.time.update_s if correction.rest_s is None else correction.rest_s
    return StepPrediction(
        correction,
        step_s=_actions_s(corrected) * correction.waiting + rest_s,
        phases_s=(*compute_seconds(corrected), rest_s),
        uncorrected_s=plain.step_s,
        uncorrected_actions_s=_actions_s(plain),
        uncorrected=plain.costs,
    )


def _priced(evaluated: EvaluatedCandidate, correction: CostCorrection) -> EvaluatedCandidate:
    """Return the candidate priced with a correction, with its placement unchanged."""
    workload = evaluated.candidate.workload
    if workload.correction == correction:
        return evaluated
    candidate = replace(evaluated.candidate, workload=replace(workload, correction=correction))
    return replace(evaluated, candidate=candidate, seconds=stage_seconds(candidate))


def _actions_s(evaluated: EvaluatedCandidate) -> float:
    return evaluated.step_s - evaluated.time.update_s
