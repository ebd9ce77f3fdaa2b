import pytest

from sppo.activations.activation_layout import ActivationLayout
from sppo.activations.block_layout import BlockLayout
from sppo.activations.policy import POLICIES, saved_bytes_per_token, saved_tensors
from sppo.activations.tensor_classes import (
    ATTENTION,
    class_bytes_per_token,
    tensor_bytes_per_token,
)
from sppo.config import PRESETS
from sppo.config.model import ModelConfig

LLAMA = ModelConfig.model_validate(PRESETS["llama-3.1-8b"])
QWEN3 = ModelConfig.model_validate(PRESETS["qwen3-8b"])
GPT = ModelConfig.model_validate(PRESETS["gpt-7b"])


def saved_of(policy, model):
    return saved_tensors(policy, model, model.layer_type(0))


def test_names_by_policy():
    assert saved_of("recompute", LLAMA) == {"x_in"}
    assert saved_of("keep_attention", LLAMA) == {"x_in", "o", "lse"}
    assert saved_of("retain", LLAMA) == {"x_in", "q", "o", "lse", "x_mid", "gate", "up"}
    assert saved_of("retain", GPT) == {"x_in", "q", "o", "lse", "x_mid", "up"}
    assert saved_of("retain", QWEN3) == saved_of("retain", LLAMA) | {"k"}


def test_bytes_of_a_published_shape():
    """Llama 3.1 8B in bf16: E = ND = 4096, F = 14336, 32 heads whose lse is fp32."""
    assert tensor_bytes_per_token(LLAMA, LLAMA.layer_type(0), element_bytes=2) == {
        "x_in": 8192,
        "q": 8192,
        "o": 8192,
        "lse": 128,
        "x_mid": 8192,
        "up": 28672,
        "gate": 28672,
    }
    saved = [
        saved_bytes_per_token(policy, LLAMA, layers=range(1), element_bytes=2)
        for policy in POLICIES
    ]
    assert saved == [90240, 16512, 8192]


def test_norms_of_outputs_save_what_they_norm():
    normed = LLAMA.model_copy(update={"norm_placement": "both"})
    pre, both = saved_of("retain", LLAMA), saved_of("retain", normed)
    assert both == pre - {"x_mid"} | {"attention_out", "mlp_out"}


def test_linear_attention_saves_projections_and_nothing_of_attention():
    """Qwen3.5 9B in bf16: 8192 channels, 32 value heads of 128; every fourth layer has K and V."""
    model = ModelConfig.model_validate(PRESETS["qwen3.5-9b"])
    linear, full = map(model.layer_type, (0, 3))
    sizes = tensor_bytes_per_token(model, linear, element_bytes=2)
    projections = {"linear_inputs": 16384 + 128, "linear_gate": 8192}
    stream = {"x_in": 8192, "x_mid": 8192, "gate": 24576, "up": 24576}
    assert sizes == projections | stream
    assert class_bytes_per_token(model, linear, element_bytes=2)[ATTENTION] == 0
    assert tensor_bytes_per_token(model, full, element_bytes=2)["attention_gate"] == 8192
    layout = BlockLayout(model, layers=range(8), element_bytes=2)
    keys = ActivationLayout(layout, {}).kv_keys((0, 0))
    assert [key.layer for key in keys] == [3, 7]


def test_layers_with_experts_save_rows_of_each_choice_and_always_the_choice():
    """GLM 4.5 Air in bf16: first layer dense, F = 10944; then 8 of 128 experts, F = 1408."""
    model = ModelConfig.model_validate(PRESETS["glm-4.5-air"])
    experts, widths = model.experts, {}
    assert experts is not None
    for layer in (0, 1):
        sizes = tensor_bytes_per_token(model, model.layer_type(layer), element_bytes=2)
        widths[layer] = {name: sizes.get(name) for name in ("up", "shared_gate", "chosen")}
    assert widths[0] == {"up": 2 * 10944, "shared_gate": None, "chosen": None}
    assert widths[1] == {"up": 2 * 8 * 1408, "shared_gate": 2 * 1408, "chosen": 2 * 8}
    assert saved_tensors("recompute", model, model.layer_type(0)) == {"x_in"}
    assert saved_tensors("recompute", model, model.layer_type(1)) == {"x_in", "chosen"}
    both = saved_bytes_per_token("recompute", model, layers=range(2), element_bytes=2)
    assert both == 2 * 2 * model.hidden_size + 2 * 8


@pytest.mark.parametrize("element_bytes", [2, 4, 8])
def test_log_sum_exp_is_never_narrower_than_fp32(element_bytes):
    assert tensor_bytes_per_token(GPT, GPT.layer_type(0), element_bytes=element_bytes)[
        "lse"
    ] == 32 * max(4, element_bytes)


def test_policies_go_from_most_memory_to_least():
    for model in (LLAMA, QWEN3, GPT):
        saved = [
            saved_bytes_per_token(policy, model, layers=range(1), element_bytes=2)
            for policy in POLICIES
        ]
        assert saved == sorted(saved, reverse=True)
        assert len(set(saved)) == len(saved)


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match="'offload' is not one of retain, keep_attention"):
        saved_of("offload", LLAMA)
