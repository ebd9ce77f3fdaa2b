"""Layers of stages: equally many, or with linear attention as equal in weight as possible."""

from math import ceil

import pytest

from sppo.config import PRESETS, ModelConfig
from sppo.cost.stage_layers import layers_of_stages
from sppo.planning.search.choices import virtual_stages_to_try
from tests.planning.cases import run_config

HYBRIDS = ("qwen3.5-4b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b")


def model(preset="tiny-test", **fields):
    return ModelConfig.model_validate({**PRESETS[preset], **fields})


def lengths(shape, num_ranks, num_virtual=1):
    stages = layers_of_stages(shape, num_ranks=num_ranks, num_virtual=num_virtual)
    assert [layer for stage in stages for layer in stage] == [*range(shape.num_layers)]
    return [len(stage) for stage in stages]


def with_attention(shape, num_ranks, num_virtual=1):
    """Number of layers with attention of each stage."""
    stages = layers_of_stages(shape, num_ranks=num_ranks, num_virtual=num_virtual)
    return [sum(not shape.layer_type(layer).linear for layer in stage) for stage in stages]


def test_layers_of_one_type_are_cut_by_number():
    assert lengths(model(num_layers=10), 2, 2) == lengths(model(num_layers=10), 4) == [3, 3, 2, 2]
    assert lengths(model("gemma-3-27b"), 4) == [16, 16, 15, 15]
    with pytest.raises(ValueError, match="4 layers on 5 stages: every stage needs a layer"):
        layers_of_stages(model(num_layers=4), num_ranks=5)


@pytest.mark.parametrize("preset", HYBRIDS)
def test_layers_with_attention_are_spread_evenly(preset):
    shape = model(preset)
    for num_ranks in range(1, shape.num_layers + 1):
        assert min(lengths(shape, num_ranks)) >= 1
        own = with_attention(shape, num_ranks)
        assert max(own) == ceil(shape.num_attention_layers / num_ranks), own


def test_whole_patterns_stay_whole():
    shape = model("qwen3.5-4b")
    for num_ranks, num_virtual in ((1, 1), (2, 1), (2, 4), (4, 2), (8, 1)):
        stages = num_ranks * num_virtual
        assert set(lengths(shape, num_ranks, num_virtual)) == {32 // stages}
        assert set(with_attention(shape, num_ranks, num_virtual)) == {8 // stages}


def test_stages_with_more_attention_have_fewer_layers():
    shape = model("qwen3-next-80b-a3b")
    assert with_attention(shape, 8) == [1, 2] * 4
    assert lengths(shape, 8) == [7, 5] * 4


@pytest.mark.parametrize("preset", HYBRIDS)
def test_several_stages_leave_no_rank_with_more_than_its_share(preset):
    run, shape = run_config(preset, length="64Ki"), model(preset)
    tried = [
        (num_ranks, virtual)
        for num_ranks in range(2, shape.num_attention_layers)
        for virtual in virtual_stages_to_try(run, num_ranks=num_ranks)
    ]
    assert any(virtual > 1 for _, virtual in tried)
    for num_ranks, virtual in (*tried, (shape.num_attention_layers, 2)):
        own = with_attention(shape, num_ranks, virtual)
        of_ranks = [sum(own[rank::num_ranks]) for rank in range(num_ranks)]
        assert max(of_ranks) == ceil(shape.num_attention_layers / num_ranks), (own, num_ranks)
