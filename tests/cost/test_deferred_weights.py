"""Deferred weight gradients cost a copy of their operands on a CPU, and nothing on a GPU."""

from dataclasses import replace

import numpy as np
import pytest

from sppo.config.model import ModelConfig
from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.stage_cost import stage_seconds, weight_operand_bytes
from sppo.hardware.presets import PRESETS

MODEL = ModelConfig(
    vocab_size=512, hidden_size=64, num_layers=4, num_heads=2, num_kv_heads=2, mlp_size=256
)


def added_seconds(hardware, schedule="seq_zb_h1"):
    """Seconds that a schedule adds to the weight halves of Seq1F1B, and its candidate."""
    workload = Workload(MODEL, PRESETS[hardware], dtype="fp32")
    candidate = Candidate(workload, (512, 256), pipeline_parallel_degree=2, schedule="sppo")
    deferring = replace(candidate, schedule=schedule)
    one, other = (stage_seconds(which) for which in (candidate, deferring))
    np.testing.assert_array_equal(one.forward, other.forward)
    np.testing.assert_array_equal(one.backward, other.backward)
    return other.weight - one.weight, deferring


def test_a_cpu_copies_the_operands():
    added, candidate = added_seconds("laptop-cpu")
    rate = candidate.workload.hardware.device.memory_bytes_per_s
    np.testing.assert_allclose(added, 2 * weight_operand_bytes(candidate) / rate)
    assert (added > 0).all()


@pytest.mark.parametrize(
    ("hardware", "schedule"), [("h100", "seq_zb_h1"), ("laptop-cpu", "seq1f1b")]
)
def test_others_add_nothing(hardware, schedule):
    added, _ = added_seconds(hardware, schedule)
    assert not added.any()
