"""Memory of a model and of one sequence, against closed forms."""

from __future__ import annotations

import pytest

from sppo.cost.parameters import num_parameters
from sppo.hardware.presets import PRESETS
from sppo.planning.estimate import estimate, model_counts
from tests.make import make_run


def test_18_bytes_per_parameter():
    counts = model_counts(make_run("gpt-7b", length=8192))
    assert counts.parameters == num_parameters(make_run("gpt-7b", length=8192).model)
    assert counts.state_bytes_per_parameter == 18
    assert counts.state_bytes / 1e9 == pytest.approx(120, rel=0.01)
    in_fp32 = model_counts(make_run("gpt-7b", length=8192, train={"dtype": "fp32"}))
    assert in_fp32.state_bytes_per_parameter == 16


def test_2_bytes_per_frozen_parameter():
    adapted = make_run("llama-3.1-8b", length=8192, adapter={"rank": 32})
    counts, frozen = model_counts(adapted), num_parameters(adapted.model)
    sides = 2 * 4096 + 2 * (4096 + 1024) + 2 * 4096 + 3 * (4096 + 14336)
    assert counts.trained_parameters == counts.parameters - frozen == 32 * 32 * sides
    assert counts.state_bytes == 2 * frozen + 18 * counts.trained_parameters
    assert counts.state_bytes / 1e9 == pytest.approx(17.6, rel=0.01)


def test_stages_add_up_to_the_model():
    parallel = {
        "virtual_stages": 1,
        "data_parallel_degree": 1,
        "pipeline_parallel_degree": 4,
        "sequence_parallel_degree": 1,
    }
    run = make_run(
        "llama-3.2-1b", length=1 << 16, parallel=parallel, activations={"policy": "retain"}
    )
    found = estimate(run, hardware=PRESETS["h200"])
    stages = [held.device for held in found.evaluated.memory]
    assert sum(s.activations_bytes for s in stages) == found.counts.saved_bytes["retain"]
    assert sum(s.kv_bytes for s in stages) == found.counts.kv_bytes
    assert sum(s.kv_gradients_bytes for s in stages) == found.counts.kv_gradients_bytes
    states = sum(s.weights_bytes + s.gradients_bytes + s.optimizer_bytes for s in stages)
    # The tied vocabulary projection is a second copy on the last stage.
    copied = run.model.vocab_size * run.model.hidden_size
    assert states == 18 * (found.counts.parameters + copied)
