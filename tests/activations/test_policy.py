import pytest

from sppo.activations.policy import POLICIES, saved_bytes_per_token, saved_tensors
from sppo.activations.tensor_classes import tensor_bytes_per_token
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
