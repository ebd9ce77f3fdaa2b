from math import prod

import pytest

from sppo.config import PRESETS
from sppo.config.model import ModelConfig
from sppo.cost.parameters import is_decayed, layer_shapes, num_parameters, parameter_shapes

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


@pytest.mark.parametrize(
    ("name", "rough"), [("gpt-7b", 6.44e9), ("gpt-13b", 12.6e9), ("gpt-65b", 64.4e9)]
)
def test_the_paper_s_shapes(name, rough):
    """12 L E^2 in the layers; positions and vocabulary come on top."""
    model = preset(name)
    layers = model.num_layers * sum(prod(shape) for shape in layer_shapes(model).values())
    assert layers == pytest.approx(rough, rel=0.005)


def test_names_and_shapes_of_a_small_model():
    model = ModelConfig.model_validate(
        {
            "vocab_size": 11,
            "hidden_size": 6,
            "num_layers": 1,
            "num_heads": 3,
            "num_kv_heads": 1,
            "head_size": 4,
            "mlp_size": 10,
            "qkv_bias": True,
            "qk_norm": True,
        }
    )
    assert parameter_shapes(model) == {
        "embed.weight": (11, 6),
        "layers.0.attention_norm.weight": (6,),
        "layers.0.q.weight": (12, 6),
        "layers.0.q.bias": (12,),
        "layers.0.k.weight": (4, 6),
        "layers.0.k.bias": (4,),
        "layers.0.v.weight": (4, 6),
        "layers.0.v.bias": (4,),
        "layers.0.q_norm.weight": (4,),
        "layers.0.k_norm.weight": (4,),
        "layers.0.o.weight": (6, 12),
        "layers.0.mlp_norm.weight": (6,),
        "layers.0.gate.weight": (10, 6),
        "layers.0.up.weight": (10, 6),
        "layers.0.down.weight": (6, 10),
        "final_norm.weight": (6,),
        "head.weight": (11, 6),
    }


def test_matrices_decay_and_nothing_else():
    for model in (preset("tiny-gpt"), preset("qwen3-0.6b")):
        for name, shape in parameter_shapes(model).items():
            assert is_decayed(name) == (len(shape) == 2), name
