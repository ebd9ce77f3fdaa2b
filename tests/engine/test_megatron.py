"""Megatron's sequence parallelism: bytes that a rank holds; numbers are pinned random trainings."""

import pytest

from sppo.activations.policy import classes_retained
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_bytes_per_token
from sppo.cost.layer import Workload
from sppo.cost.stages.saved_bytes import row_bytes_of
from sppo.hardware.presets import PRESETS
from tests.random_training.case import Shape
from tests.random_training.pinned_cases import GQA, case
from tests.random_training.training import faults_of, results_of

ALIGNED = {"hidden": 16, "heads": 4, "head_size": 8, "mlp_size": 32}
"""Every saved tensor of 8 tokens is a multiple of the 64 bytes that slots are made of."""


def test_recomputing_part_of_a_class_is_refused():
    one = case(GQA, sp=2, sequence_parallel="megatron", ratio=0.9, policy="rebuilt", cuts=(0, 5, 9))
    (fault,) = faults_of(one)
    assert "rows of linear of subsequence 0" in fault
    assert "recomputes" in fault


@pytest.mark.parametrize("policy", ["retain", "keep_attention", "recompute"])
@pytest.mark.parametrize(
    "shape", [Shape(**ALIGNED), Shape("qwen3", kv_heads=2, **ALIGNED)], ids=lambda s: s.family
)
def test_bytes_held_are_those_predicted(shape, policy):
    """Saved tensors, K, V and their gradients: a rank holds exactly its share, no more."""
    one = case(shape, sp=2, sequence_parallel="megatron", policy=policy, cuts=(0, 16, 32))
    model = one.model.config()
    workload = Workload(
        model,
        PRESETS["a100-80g"],
        dtype="fp32",
        sequence_parallel_degree=2,
        sequence_parallel="megatron",
    )
    candidate = Candidate(workload, lengths=(16, 16))
    tokens, wider = 32, 2  # float64 where fp32 is predicted
    per_token = row_bytes_of(candidate)[0] * wider
    retained = (
        sum(per_token[index] for index in classes_retained(policy)) + model.hidden_size * 8 / 2
    )
    kv = sum(kv_bytes_per_token(workload)) * model.num_layers * wider
    for (result,) in results_of(one):
        assert result.peaks.activations_bytes == tokens * retained
        assert result.peaks.kv_bytes == tokens * kv
