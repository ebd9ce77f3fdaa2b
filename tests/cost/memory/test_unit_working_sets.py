"""Working sets of running units: never below the working set of a unit by itself."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.activations.placement import ActivationPlacement
from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.memory.unit_messages import sent_bytes
from sppo.cost.memory.unit_runs import unit_runs
from sppo.cost.memory.unit_working_sets import computing_bytes, loss_bytes, run_working_bytes
from tests.planning.cases import machine, run_config

MODEL = run_config("llama-3.2-1b").model


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    stages=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_working_sets_are_not_below_those_of_each_unit(lengths, stages, seed):
    lengths = tuple(128 * length for length in lengths)
    candidate = Candidate(Workload(MODEL, machine()), lengths, pipeline_parallel_degree=stages)
    tokens = np.tile(np.array(lengths)[None, :, None], (stages, 1, 3))
    recomputed = tokens * np.random.default_rng(seed).integers(0, 2, tokens.shape)
    recomputed[:, :, 0] = 0
    placement = ActivationPlacement(tokens - recomputed, 0 * tokens, recomputed)
    found = computing_bytes(candidate, placement)
    for stage in range(stages):
        for index, run in enumerate(unit_runs(candidate, placement, stage=stage)):
            forward, backward = run_working_bytes(candidate, run, stage=stage)
            if candidate.is_last_stage(stage):
                forward = max(forward, loss_bytes(candidate.workload, tokens=run.tokens))
            assert found.forward[stage, index] >= forward
            assert found.backward[stage, index] >= backward
    # The longest unit is not taken for more than it is.
    assert found.most.max() <= 1.2 * max(
        max(run_working_bytes(candidate, run, stage=stage))
        if not candidate.is_last_stage(stage)
        else max(
            *run_working_bytes(candidate, run, stage=stage),
            loss_bytes(candidate.workload, tokens=run.tokens),
        )
        for stage in range(stages)
        for run in unit_runs(candidate, placement, stage=stage)
    )


def test_the_ends_of_a_pipeline_have_one_neighbour():
    candidate = Candidate(Workload(MODEL, machine()), (256, 128), pipeline_parallel_degree=3)
    row = MODEL.hidden_size * 2
    assert sent_bytes(candidate).forward.tolist() == [
        [2 * 256 * row, 2 * 128 * row],
        [4 * 256 * row, 4 * 128 * row],
        [2 * 256 * row, 2 * 128 * row],
    ]
