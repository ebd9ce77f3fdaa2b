"""Random requests: the answer fits, nothing listed is faster, and all commands say the same."""

from __future__ import annotations

import random

import pytest

from sppo.config.run import RunConfig
from sppo.hardware.file import hardware_for
from sppo.planning.estimate import estimate
from sppo.planning.make_plan import make_plan
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.simulated_candidate import simulated_device_bytes
from sppo.planning.search.solver import Solution, solve
from sppo.planning.simulated_run import simulated_plan
from sppo.schedule.simulation.simulate import simulate
from tests.planning.cases import run_config

REQUESTS_EACH = 5


def some_request(dice: random.Random) -> RunConfig:
    """A model, a sequence, a cluster, and some of what a run file may fix."""
    parallel: dict[str, object] = {}
    if dice.random() < 0.3:
        parallel["pipeline_parallel_degree"] = dice.choice([1, 2, 4])
    if dice.random() < 0.3:
        parallel["sequence_parallel_degree"] = dice.choice([1, 2, 8])
    if dice.random() < 0.3:
        parallel["zero"] = dice.choice([0, 1, 3])
    if dice.random() < 0.4:
        parallel["schedule"] = dice.choice(
            ["sppo", "seq1f1b", "1f1b", "seq_zb_h1", "sppo_msp", "looped_bfs"]
        )
    if parallel.get("schedule", "auto") in ("auto", "looped_bfs") and dice.random() < 0.4:
        parallel["virtual_stages"] = dice.choice([1, 2, 4])
    hardware = {"preset": dice.choice(["a100-80g", "h100", "h200"]), "nodes": dice.choice([1, 2])}
    if dice.random() < 0.3:
        hardware["margin"] = dice.choice([0.0, 0.1])
    return run_config(
        dice.choice(["llama-3.2-1b", "gpt-7b", "llama-3.1-8b"]),
        length=f"{dice.choice([16, 48, 128, 300])}Ki",
        train={"sequences_per_step": dice.choice([1, 1, 2, 4, 6])},
        parallel=parallel,
        activations={"policy": dice.choice(["auto", "auto", "auto", "retain", "sppo"])},
        hardware=hardware,
    )


def answers(seed: int) -> list[tuple[RunConfig, Solution]]:
    """Solutions of some requests; those that contradict themselves are refused and left out."""
    dice = random.Random(f"agreement {seed}")
    found = []
    while len(found) < REQUESTS_EACH:
        run = some_request(dice)
        try:
            found.append((run, solve(run, hardware=hardware_for(run.hardware))))
        except ValueError:
            continue
    return found


def as_recommended(run: RunConfig, best: EvaluatedCandidate) -> RunConfig:
    """`run` with everything written that the solver chose, but the policy."""
    degrees, candidate = best.degrees, best.candidate
    parallel = {
        "data_parallel_degree": degrees.data_parallel,
        "pipeline_parallel_degree": degrees.pipeline_parallel,
        "sequence_parallel_degree": degrees.sequence_parallel,
        "schedule": candidate.schedule,
        "virtual_stages": candidate.virtual_stages,
    }
    cut = {"num_subsequences": len(candidate.lengths)}
    return run.model_copy(
        update={
            "parallel": run.parallel.model_copy(update=parallel),
            "sequence": run.sequence.model_copy(update=cut),
        }
    )


@pytest.mark.parametrize("seed", range(60))
def test_answers_fit_are_best_and_agree(seed: int):
    solved = 0
    for run, solution in answers(seed):
        best = solution.best
        if best is None:
            assert all(rejection.reason for rejection in solution.rejected)
            continue
        solved += 1
        hardware = solution.hardware
        for listed in (best, *solution.runners_up, *solution.by_num_subsequences):
            assert listed.shortfall is None
            assert listed.device_peak_bytes <= hardware.device.usable_bytes
            assert listed.tier_peak_bytes <= hardware.host_bytes_per_device
        assert all(best.step_s <= other.step_s for other in solution.runners_up)

        plan = make_plan(run, best)
        assert plan.predicted.device_peak_bytes == best.device_peak_bytes
        played = simulated_plan(plan)
        timeline = simulate(played.case.schedule, costs=played.case.costs)
        peaks = [
            steady + round(track.memory["total"].peak_bytes)
            for steady, track in zip(played.steady_bytes, timeline.ranks, strict=True)
        ]
        assert played.num_devices == best.degrees.num_devices
        assert max(peaks) <= plan.predicted.device_peak_bytes + 8
        if best.played is not None:
            assert peaks == list(simulated_device_bytes(best))
            assert timeline.makespan_s == pytest.approx(plan.predicted.step_s)

        # Of the request as it is `estimate` asks the solver again, so once for each seed.
        for request in (as_recommended(run, best), run)[: 2 if solved == 1 else 1]:
            found = estimate(request, hardware=hardware).evaluated
            assert found.degrees == best.degrees
            assert found.candidate.schedule == best.candidate.schedule
            assert found.shortfall is None
            assert found.device_peak_bytes == best.device_peak_bytes
            assert found.tier_peak_bytes == best.tier_peak_bytes
    assert solved, "no request of this seed can be served"
