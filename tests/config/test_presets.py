import pytest

from sppo.config import PRESETS, ModelConfig
from sppo.config.huggingface.model_config import hf_config, model_fields
from sppo.config.loading import expand_model
from sppo.cost.parameters import num_parameters


def model(**fields):
    found = []
    expanded = expand_model(fields, found)
    assert not found
    return ModelConfig.model_validate(expanded)


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.213),
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
        ("qwen2.5-7b", 7.616),
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.721),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.191),
        ("mistral-7b", 7.242),
        ("ministral-8b", 8.020),
        ("phi-4", 14.660),
        ("smollm3-3b", 3.075),
        ("olmo-3-7b", 7.298),
        ("qwen3-30b-a3b", 30.532),
        ("qwen3-235b-a22b", 235.094),
        ("mixtral-8x7b", 46.703),
    ],
)
def test_published_models_have_as_many_parameters_as_published(preset, billions):
    assert num_parameters(model(preset=preset)) / 1e9 == pytest.approx(billions, abs=6e-4)


# Of their reports: gpt-oss model card, table 1; Gemma 3 report, table 1 (without the vision
# encoder); GLM-4.5 report (without the layer that predicts one more token).
@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83),
        ("gemma-3-4b", 3.884),
        ("gemma-3-12b", 11.771),
        ("gemma-3-27b", 27.016),
        ("glm-4.5-air", 106.4),
        # Sums of the published files, without the layer that predicts one more token and without
        # the vision encoder.
        ("qwen3-next-80b-a3b", 79.67),
        ("qwen3.5-4b", 4.206),
        ("qwen3.5-9b", 8.954),
        ("qwen3.5-27b", 26.90),
        ("qwen3.5-35b-a3b", 34.66),
    ],
)
def test_reported_models_have_about_as_many_parameters_as_reported(preset, billions):
    assert num_parameters(model(preset=preset)) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("preset", "family"),
    {
        "ministral-8b": "ministral",
        "phi-4": "phi3",
        "smollm3-3b": "smollm3",
        "olmo-3-7b": "olmo3",
        "gemma-3-27b": "gemma3_text",
        "qwen3-235b-a22b": "qwen3_moe",
        "gpt-oss-120b": "gpt_oss",
        "mixtral-8x7b": "mixtral",
        "glm-4.5-air": "glm4_moe",
        "qwen3-next-80b-a3b": "qwen3_next",
        "qwen3.5-27b": "qwen3_5_text",
        "qwen3.5-35b-a3b": "qwen3_5_moe_text",
    }.items(),
)
def test_published_models_are_those_of_their_families(preset, family):
    shape = model(preset=preset)
    written = hf_config(shape, dtype="bf16")
    assert written["model_type"] == family
    read = ModelConfig.model_validate({**model_fields(written), "preset": preset})
    unnamed = [one.model_copy(update={"family": None}) for one in (read, shape)]
    assert unnamed[0] == unnamed[1]


@pytest.mark.parametrize(("preset", "billions"), [("gpt-7b", 7), ("gpt-13b", 13), ("gpt-65b", 65)])
def test_the_papers_models_have_about_the_parameters_of_their_names(preset, billions):
    shape = model(preset=preset, max_positions=2048)
    assert num_parameters(shape) / 1e9 == pytest.approx(billions, rel=0.06)


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"preset": "tiny-test", "num_layers": 5}, "num_layers", 5),
        ({"preset": "tiny-test", "mlp": "gelu"}, "hidden_size", 32),
        # A derived size of a head follows what is given; a chosen one stays.
        ({"preset": "llama-3.1-8b"}, "head_dim", 128),
        ({"preset": "llama-3.1-8b", "hidden_size": 2048}, "head_dim", 64),
        ({"preset": "llama-3.1-8b", "num_heads": 64}, "head_dim", 64),
        ({"preset": "qwen3-0.6b"}, "head_dim", 128),
        ({"preset": "qwen3-0.6b", "hidden_size": 1536}, "head_dim", 128),
        ({"preset": "tiny", "hidden_size": 512, "num_heads": 4}, "head_dim", 64),
        ({"preset": "tiny", "head_size": None}, "head_dim", 128),
        # Key/value heads follow where there are as many as query heads.
        ({"preset": "gpt-7b", "num_heads": 16}, "kv_heads", 16),
        ({"preset": "llama-3.1-8b", "num_heads": 16}, "kv_heads", 8),
        ({"preset": "llama-3.1-8b", "num_heads": 16, "num_kv_heads": None}, "kv_heads", 16),
    ],
)
def test_given_fields_win(fields, attribute, value):
    assert getattr(model(**fields), attribute) == value


def test_rope_scaling_is_overridden_key_by_key():
    scaling = model(preset="llama-3.2-1b", rope_scaling={"factor": 64}).rope_scaling
    assert (scaling.type, scaling.factor, scaling.original_max_positions) == ("llama3", 64.0, 8192)
    linear = model(preset="llama-3.2-1b", rope_scaling={"type": "linear", "factor": 2})
    assert linear.rope_scaling.original_max_positions is None
    assert model(preset="llama-3.2-1b", rope_scaling=None).rope_scaling is None


def test_experts_are_overridden_key_by_key():
    experts = model(preset="qwen3-30b-a3b", experts={"count": 16}).experts
    assert (experts.count, experts.per_token, experts.normalize) == (16, 8, True)
    assert model(preset="qwen3-30b-a3b", experts=None).experts is None


def test_linear_attention_is_overridden_key_by_key():
    linear = model(preset="qwen3.5-9b", linear_attention={"value_heads": 16}).linear_attention
    assert (linear.key_heads, linear.value_heads, linear.conv_width) == (16, 16, 3 * 2048)
    plain = model(preset="qwen3.5-9b", linear_attention=None, layer_types=None)
    assert not any(plain.layer_type(layer).linear for layer in range(plain.num_layers))


def test_overriding_leaves_the_preset_as_it_was():
    before = repr(PRESETS)
    model(preset="llama-3.2-1b", rope_scaling={"factor": 64}, num_heads=16)
    assert repr(PRESETS) == before
