"""States of linear attention: bytes, and when they are held."""

from dataclasses import replace

import numpy as np
import pytest

from sppo.config import PRESETS as MODELS
from sppo.config.model import ModelConfig
from sppo.cost.candidate import Candidate
from sppo.cost.forward_only import forward_memory
from sppo.cost.kv import kv_of_units
from sppo.cost.linear_attention.states import states_of_units
from sppo.cost.memory.state_memory import state_memory
from sppo.cost.memory.walk import walk_of
from sppo.cost.trainable import Adapter, Trainable
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS

STATE = 32 * 128 * 128 * 4 + 3 * 8192 * 2
"""Bytes of a state of Qwen3.5 9B: 32 matrices in fp32, and 3 rows of 8192 channels in bf16."""


@pytest.fixture
def hybrid():
    """Qwen3.5 9B, 24 of whose 32 layers have linear attention, in 8 subsequences."""
    workload = Workload(ModelConfig.model_validate(MODELS["qwen3.5-9b"]), PRESETS["h200"])
    return Candidate(workload, (16 << 10,) * 8)


def test_a_state_is_held_until_its_subsequence_has_run_backward(hybrid):
    """None behind the last one; K and V are those of 8 layers."""
    states = states_of_units(hybrid)
    assert states.tolist() == [[24 * STATE] * 7 + [0]]
    held = walk_of(hybrid).held(states)[0, : 2 * 8] / (24 * STATE)
    assert held.tolist() == [1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 6, 5, 4, 3, 2, 1]
    keys = [table.sum() for table in kv_of_units(hybrid)]
    assert keys[0] == 8 * 2 * 4 * 256 * 2 * sum(hybrid.lengths)
    device = state_memory(hybrid)[0].device
    assert device.kv_bytes == keys[0] + 24 * 7 * STATE
    group = replace(hybrid, workload=replace(hybrid.workload, sequence_parallel_degree=4))
    assert np.array_equal(states_of_units(group), states / 4)


def test_layers_without_backward_and_evaluations_hold_the_newest_state(hybrid):
    above = Trainable(Adapter(8, 1.0, ("q",), (23,)), ())
    frozen = replace(hybrid, workload=replace(hybrid.workload, trainable=above))
    assert states_of_units(frozen).tolist() == [[6 * STATE] * 7 + [0]]
    passing_keys = 5 * 2 * 4 * 256 * 2 * sum(hybrid.lengths)
    assert kv_of_units(frozen)[2].sum() == passing_keys + 18 * STATE
    (evaluated,) = forward_memory(hybrid, training=state_memory(hybrid))
    assert evaluated.kv_bytes == kv_of_units(hybrid)[0].sum() + 24 * STATE
