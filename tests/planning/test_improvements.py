"""Improvements that the solver lists without request: each gives what it promises."""

from __future__ import annotations

import pytest

from sppo.config.run import RunConfig
from sppo.hardware.run_hardware import hardware_for
from sppo.planning.changes import WORTH_IT, improvements
from sppo.planning.search.solver import quick_best
from tests.planning.cases import run_config, solved
from tests.tiers import exhaustive


def request(
    model="llama-3.2-1b", *, preset="h100", nodes=1, devices=8, length="64Ki", **sections
) -> RunConfig:
    """A request that leaves out MSP, whose search takes seconds."""
    return run_config(
        model,
        length=length,
        hardware={"preset": preset, "nodes": nodes, "devices_per_node": devices},
        **{**sections, "parallel": {"multiplexed": "off", **sections.get("parallel", {})}},
    )


def followed(run: RunConfig, change: str) -> RunConfig:
    """`run` with a change as it is listed, `section.key=value ...`."""
    for override in change.split():
        name, value = override.split("=")
        section, key = name.split(".")
        typed = {"true": True, "null": None}.get(value, int(value) if value.isdigit() else value)
        part = getattr(run, section).model_copy(update={key: typed})
        run = run.model_copy(update={section: part})
    return run


def rate(run: RunConfig) -> float:
    """Tokens per second and device of the best answer."""
    tokens = run.sequence.length * run.train.sequences_per_step
    hardware = hardware_for(run.hardware)
    best = solved(run).best
    assert best is not None
    return tokens / best.step_s / hardware.num_devices


LITTLE_ROOM = request("llama-3.1-8b", preset="a100-40g", nodes=2, devices=4, length="512Ki")
STAGES = {"pipeline_parallel_degree": 4, "sequence_parallel_degree": 2}


CUT_IN_TWO = request(parallel=STAGES, sequence={"boundaries": [0, 4096, 65536]})


@pytest.mark.parametrize(
    "run_and_key",
    [
        (request(parallel=STAGES, nodes=2), "hardware.nodes"),
        (request(sequence={"num_subsequences": 64}), "sequence.num_subsequences"),
        *exhaustive(
            (request(nodes=2), "train.sequences_per_step"),
            (CUT_IN_TWO, "sequence.num_subsequences"),
            (request(activations={"policy": "recompute"}), "activations.policy"),
            (LITTLE_ROOM, "state.optimizer"),
            (LITTLE_ROOM, "parallel.zero"),
        ),
    ],
)
def test_what_is_listed_pays_as_much_as_it_says(run_and_key):
    run, key = run_and_key
    listed = improvements(solved(run))
    gains = [improvement.gain for improvement in listed]
    assert gains == sorted(gains, reverse=True)
    found = {improvement.change.partition("=")[0]: improvement for improvement in listed}
    improvement = found[key]
    assert improvement.gain >= WORTH_IT
    gained = rate(followed(run, improvement.change)) / rate(run)
    # The full answer has every number of subsequences to choose from.
    assert improvement.gain * (1 - 1e-9) <= gained <= improvement.gain * 1.1


def test_a_good_answer_has_none():
    busy = request(devices=1, length="16Ki", train={"sequences_per_step": 8})
    assert improvements(solved(busy)) == ()


def test_changes_are_priced_with_units_cut_over_ranks_as_the_answer_is():
    run = run_config(
        "llama-3.1-8b",
        length="256Ki",
        hardware={"preset": "a100-80g", "nodes": 2},
        parallel={"virtual_stages": 1},
    )
    solution = solved(run)
    assert solution.best.candidate.schedule == "sppo_msp"
    again = quick_best(run, solution.hardware)
    assert again.candidate.schedule == "sppo_msp"
    assert again.step_s == pytest.approx(solution.best.step_s)
