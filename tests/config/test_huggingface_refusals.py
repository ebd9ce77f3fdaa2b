"""Settings and families of a config.json that are refused, by name and with what is supported."""

import pytest

from sppo.config.huggingface.families import FAMILIES as RECORDS
from sppo.config.huggingface.families import REFUSED_FAMILIES
from sppo.config.huggingface.model_config import model_fields
from tests.config.test_huggingface import EXPERTS, HYBRID, YARN, config_json
from tests.model.hf_models import FAMILIES


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("bert", {}, ["model_type 'bert'", "llama, qwen2, qwen3, mistral, gpt2"]),
        ("llama", {"hidden_act": "relu"}, ["hidden_act 'relu'", "silu"]),
        ("llama", {"hidden_size": None}, ["lacks hidden_size"]),
        ("llama", {"hidden_size": "24"}, ["hidden_size '24'", "whole number"]),
        ("llama", {"hidden_size": 25}, ["hidden_size 25", "num_attention_heads 6"]),
        ("llama", {"rms_norm_eps": "x"}, ["rms_norm_eps 'x'"]),
        ("llama", {"tie_word_embeddings": 1}, ["tie_word_embeddings 1", "true or false"]),
        ("llama", {"quantization_config": {"bits": 4}}, ["quantization_config", "plain weights"]),
        ("llama", {"num_local_experts": 8}, ["num_local_experts 8", "dense"]),
        ("llama", {"is_causal": False}, ["is_causal False"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "yarn"]),
        ("llama", {"rope_scaling": {"type": "longrope"}}, ["'longrope'", "llama3, yarn"]),
        ("phi3", {"rope_scaling": {"type": "su"}}, ["'su'", "remove rope_scaling"]),
        ("llama", {"rope_scaling": {"type": "linear"}}, ["lacks factor"]),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2}}, ["low_freq_factor"]),
        ("llama", {"rope_parameters": {"full_attention": YARN}}, ["one rotary setting"]),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, ["no sliding_window"]),
        ("mistral", {"sliding_window": 0}, ["sliding_window 0"]),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            ["layer_types"],
        ),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "linear_attention"],
            },
            ["layer_types", "full_attention, sliding_attention"],
        ),
        ("qwen2", {"layer_types": ["full_attention"]}, ["each of 3 layers"]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, ["max_window_layers -1"]),
        ("gpt2", {"activation_function": "relu"}, ["activation_function 'relu'", "gelu_new"]),
        ("llama", {"rope_theta": 10**400}, ["rope_theta a whole number of 401 digits", "finite"]),
        ("llama", {"hidden_act": ["x" * 5000]}, ["hidden_act ['xxx", "...", "supported: silu"]),
        (
            "qwen3_moe",
            {**EXPERTS["qwen3_moe"], "num_experts_per_tok": 2, "decoder_sparse_step": 2},
            ["layers without experts [0, 2]", "the first layers"],
        ),
        (
            "qwen3_moe",
            {**EXPERTS["qwen3_moe"], "num_experts_per_tok": 2, "mlp_only_layers": 3},
            ["mlp_only_layers 3", "a list"],
        ),
        (
            "qwen3_next",
            {**EXPERTS["qwen3_next"], "decoder_sparse_step": 2},
            ["layers without experts [0, 2]", "the first layers"],
        ),
        (
            "qwen3_5_text",
            {**HYBRID, "layer_types": ["linear_attention", "full_attention", "sliding_attention"]},
            ["layer_types", "supported: full_attention, linear_attention"],
        ),
        (
            "qwen3_5_text",
            {**HYBRID, "linear_num_key_heads": 0},
            ["linear_num_key_heads 0", "at least 1"],
        ),
        ("qwen3", {"num_hidden_layers": 10**12}, ["num_hidden_layers 1000000000000", "4096"]),
        ("gemma3_text", {"hidden_size": 10**400}, ["hidden_size a whole number of 401 digits"]),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": YARN, "full_attention": YARN}},
            ["rope_type of sliding_attention 'yarn'"],
        ),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar 0"]),
        ("smollm3", {"no_rope_layers": [1, 2, 1]}, ["no_rope_layers [1, 2, 1]", "each of 3"]),
        ("gpt2", {"add_cross_attention": True}, ["add_cross_attention True"]),
        ("gpt2", {"scale_attn_weights": False}, ["scale_attn_weights False"]),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True, "is_encoder_decoder": True},
            ["scale_attn_by_inverse_layer_idx True", "is_encoder_decoder True"],
        ),
    ],
)
def test_refusals_name_key_value_and_what_is_supported(family, keys, words):
    with pytest.raises(ValueError, match="config.json") as error:
        model_fields(config_json(family, **keys))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_refused_setting_is_named(family):
    refused = RECORDS[family].refused
    with pytest.raises(ValueError, match="config.json has") as error:
        model_fields(config_json(family, **dict.fromkeys(refused, {"other": 1})))
    assert all(
        f"{key} {{'other': 1}} (supported: {refused[key][1]}" in str(error.value) for key in refused
    )


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_families_are_refused_by_name(family):
    with pytest.raises(ValueError, match=rf"model_type '{family}'.*(use \w+|extract)"):
        model_fields({"model_type": family})
