"""Candidate as it is executed: with little host memory, and with the messages of its program."""

from __future__ import annotations

from dataclasses import replace

from sppo.cost.candidate import Candidate
from sppo.planning.search.division import WORTH_IT
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate, with_executed_program
from sppo.planning.search.evaluation import evaluate_candidate, fitted_to_program

_BISECTIONS = 3
"""Number of limits tried: the host memory is the least to an eighth of what the fastest takes."""


def as_executed(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return a candidate that fits as it is executed.

    Its activations take less host memory if that costs up to 1 % of the step. A candidate that
    does not fit is returned unchanged.
    """

    def evaluate(candidate: Candidate) -> EvaluatedCandidate:
        found = evaluate_candidate(candidate)
        return found if found.shortfall is not None else with_less_host_memory(found)

    if evaluated.shortfall is not None:
        return evaluated
    return fitted_to_program(
        with_less_host_memory(evaluated),
        with_program=with_executed_program,
        evaluate=evaluate,
    )


def with_less_host_memory(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return a candidate with activations placed in less host memory if that costs up to 1 %.

    Of placements that offload, the fastest fill the tier, the last half of it for a gain smaller
    than predictions are exact. Closed forms are compared; the step is simulated once more.

    Args:
        evaluated: Candidate that fits. Returned unchanged if it puts no activations in host memory,
            if the run fixes what is offloaded, or if units are cut (MSP), which takes long.
    """
    candidate = evaluated.candidate
    fixed = candidate.policy != "hybrid" or candidate.offload_ratio is not None
    in_host = candidate.tier == "host" and evaluated.placement.offloads_anything
    if fixed or not in_host or candidate.schedule == "sppo_msp":
        return evaluated
    found, most_s = evaluated, evaluated.time.step_s / WORTH_IT
    least, most = 0, evaluated.host_peak_bytes
    for _ in range(_BISECTIONS):
        middle = (least + most) // 2
        limited = evaluate_candidate(_limited(candidate, middle), seconds=evaluated.seconds)
        if limited.shortfall is None and limited.time.step_s <= most_s:
            found, most = limited, middle
        else:
            least = middle
    found = replace(found, candidate=candidate)
    return found if found.step_s <= evaluated.step_s / WORTH_IT else evaluated


def _limited(candidate: Candidate, host_bytes: int) -> Candidate:
    """Return a candidate on a machine with `host_bytes` of host memory for each device."""
    workload = candidate.workload
    hardware = workload.hardware
    node = replace(hardware.node, host_memory_bytes=host_bytes * hardware.node.num_devices)
    return replace(candidate, workload=replace(workload, hardware=replace(hardware, node=node)))
