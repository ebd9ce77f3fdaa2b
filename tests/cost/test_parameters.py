import pytest

from sppo.config import PRESETS
from sppo.config.model import ModelConfig
from sppo.cost.parameters import is_decayed, num_parameters, parameter_shapes

# Tied weights count once.
PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
}


def preset(name):
    return ModelConfig.model_validate(PRESETS[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    assert num_parameters(preset(name)) == PUBLISHED[name]


def test_matrices_decay_and_nothing_else():
    for model in (preset("tiny-gpt"), preset("qwen3-0.6b")):
        for name, shape in parameter_shapes(model).items():
            assert is_decayed(name) == (len(shape) == 2), name
