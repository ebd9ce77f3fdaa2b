import pytest

from sppo.config import PRESETS
from sppo.config.model import ModelConfig
from sppo.cost.parameters import (
    active_parameters,
    is_decayed,
    layer_shapes,
    num_parameters,
    parameter_kind,
    parameter_shapes,
)

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
    "ministral-8b": 8_019_808_256,
    "phi-4": 14_659_507_200,
    "smollm3-3b": 3_075_098_624,
    "olmo-3-7b": 7_298_011_136,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "mixtral-8x7b": 46_702_792_704,
    "glm-4.5-air": 106_852_245_504,
}


def preset(name):
    return ModelConfig.model_validate(PRESETS[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    assert num_parameters(preset(name)) == PUBLISHED[name]


def test_matrices_decay_and_nothing_else():
    for model in (preset("tiny-gpt"), preset("qwen3-0.6b"), preset("gemma-3-4b")):
        for name, shape in parameter_shapes(model).items():
            assert is_decayed(name) == (len(shape) == 2), name


def test_experts_decay_and_their_biases_and_sinks_do_not():
    shapes = layer_shapes(preset("gpt-oss-20b"), 0)
    assert len(shapes["expert_gate.weight"]) == 3
    assert len(shapes["expert_gate.bias"]) == 2
    decayed = {name.removesuffix(".weight") for name in shapes if is_decayed(f"layers.0.{name}")}
    assert decayed == {"q", "k", "v", "o", "router", "expert_gate", "expert_up", "expert_down"}


# As in the names of the models, of gpt-oss as in its model card, of GLM-4.5 as in its report.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22.2),
        ("gpt-oss-20b", 4.2),
        ("gpt-oss-120b", 5.7),
        ("mixtral-8x7b", 12.9),
        ("glm-4.5-air", 13.4),
        ("qwen3-8b", 8.2),
    ],
)
def test_active_parameters_are_those_of_the_experts_of_a_token(name, billions):
    assert active_parameters(preset(name)) / 1e9 == pytest.approx(billions, abs=0.06)


def test_routers_and_experts_are_kinds_of_their_own():
    shapes = layer_shapes(preset("glm-4.5-air"), 1)
    kinds = {name: parameter_kind(f"layers.1.{name}") for name in shapes}
    assert kinds["router.weight"] == "router"
    assert kinds["expert_down.weight"] == "experts"
    assert kinds["shared_up.weight"] == "mlp"
    assert {kinds[f"{name}.weight"] for name in "qkvo"} == {"attention"}
