"""Layers of stages: equally many, or with linear attention as equal in weight as possible."""

from math import ceil

import pytest

from sppo.config import PRESETS, ModelConfig
from sppo.cost.stage_layers import layers_of_stages
from sppo.planning.search.choices import virtual_stages_to_try
from tests.planning.cases import run_config


def model(preset="tiny-test", **fields):
    return ModelConfig.model_validate({**PRESETS[preset], **fields})


def lengths(shape, num_stages):
    return [len(stage) for stage in layers_of_stages(shape, num_stages=num_stages)]


def with_attention(shape, num_stages):
    """Number of layers with attention of each stage."""
    stages = layers_of_stages(shape, num_stages=num_stages)
    return [sum(not shape.layer_type(layer).linear for layer in stage) for stage in stages]


def test_layers_of_one_type_are_cut_by_number():
    assert lengths(model(num_layers=10), 4) == [3, 3, 2, 2]
    windows = model("gemma-3-27b")
    assert lengths(windows, 4) == [16, 16, 15, 15]
    with pytest.raises(ValueError, match="4 layers on 5 stages: every stage needs a layer"):
        layers_of_stages(model(num_layers=4), num_stages=5)


@pytest.mark.parametrize("preset", ["qwen3.5-4b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b"])
def test_layers_with_attention_are_spread_evenly(preset):
    shape = model(preset)
    for num_stages in range(1, shape.num_layers + 1):
        stages = layers_of_stages(shape, num_stages=num_stages)
        assert [layer for stage in stages for layer in stage] == [*range(shape.num_layers)]
        assert min(map(len, stages)) >= 1
        own = with_attention(shape, num_stages)
        assert max(own) <= ceil(shape.num_attention_layers / num_stages), own


def test_whole_patterns_stay_whole():
    shape = model("qwen3.5-4b")
    for num_stages in (1, 2, 4, 8):
        assert set(lengths(shape, num_stages)) == {32 // num_stages}
        assert set(with_attention(shape, num_stages)) == {8 // num_stages}


def test_stages_with_more_attention_have_fewer_layers():
    shape = model("qwen3-next-80b-a3b")
    assert with_attention(shape, 8) == [1, 2] * 4
    assert lengths(shape, 8) == [7, 5] * 4


@pytest.mark.parametrize("preset", ["qwen3.5-4b", "qwen3.5-27b", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
def test_no_chosen_stages_leave_ranks_with_more_attention_than_one_stage_each(preset, num_ranks):
    run, shape = run_config(preset, length="64Ki"), model(preset)
    one, *several = virtual_stages_to_try(run, num_ranks=num_ranks)
    assert one == 1
    for virtual in several:
        own = with_attention(shape, num_ranks * virtual)
        assert {sum(own[rank::num_ranks]) for rank in range(num_ranks)} == {
            shape.num_attention_layers // num_ranks
        }
