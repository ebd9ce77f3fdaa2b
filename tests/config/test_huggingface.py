import copy
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.config import PRESETS, ModelConfig, RopeScaling
from sppo.config.huggingface.model_config import (
    hf_config,
    ignored_settings,
    model_fields,
    read_config,
)
from tests.model.hf_models import FAMILIES, MROPE
from tests.tiers import examples

HYBRID = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3},
    **{"linear_key_head_dim": 6, "linear_value_head_dim": 10},
}
"""Keys that families with linear attention must have."""

EXPERTS = {
    "mixtral": {},
    "qwen2_moe": {
        **{"num_experts": 8, "moe_intermediate_size": 12},
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 12},
    "olmoe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "glm4_moe": {"n_routed_experts": 8, "moe_intermediate_size": 12},
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe_text"),
        {
            **{"num_experts": 8, "moe_intermediate_size": 12},
            **{"shared_expert_intermediate_size": 16, **HYBRID},
        },
    ),
}
"""Keys that families with experts must have."""

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 44,
}
GPT2_SIZES = {"vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 32}

PUBLISHED = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3-30b": "qwen3_moe",
    "qwen3-235b": "qwen3_moe",
    "qwen3-next": "qwen3_next",
    "qwen3.5": "qwen3_5_text",
    "qwen3.5-35b": "qwen3_5_moe_text",
    "mistral": "mistral",
    "ministral": "ministral",
    "mixtral": "mixtral",
    "phi-4": "phi3",
    "smollm3": "smollm3",
    "olmo-3": "olmo3",
    "gemma-3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "glm-4.5": "glm4_moe",
    "tiny": "llama",
    "tiny-gpt": "gpt2",
}
"""Family by the beginning of the name of a preset."""

EXPORTABLE = [name for name in PRESETS if name not in ("gpt-7b", "gpt-13b", "gpt-65b")]
"""The paper's shapes have GPT-2's layers with rotary positions, which no family computes."""


def config_json(family, **keys):
    sizes = GPT2_SIZES if family == "gpt2" else {**SIZES, "num_key_value_heads": 2}
    return {"model_type": family, **sizes, **keys}


def read(family, **keys):
    return ModelConfig.model_validate(model_fields(config_json(family, **keys)))


# What the keys mean


@pytest.mark.parametrize(
    ("family", "keys", "fields"),
    [
        (
            "llama",
            {"head_dim": 10, "rms_norm_eps": 1e-5, "max_position_embeddings": 512},
            {
                **{"family": "llama", "hidden_size": 24, "num_layers": 3, "mlp_size": 44},
                **{"num_heads": 6, "num_kv_heads": 2, "head_size": 10},
                **{"norm_eps": 1e-5, "max_positions": 512, "tie_embeddings": False},
                **{"qkv_bias": False, "output_bias": False, "mlp_bias": False},
            },
        ),
        ("llama", {}, {"head_size": 4}),
        ("mistral", {"head_dim": None}, {"head_size": 4}),
        ("qwen2", {"head_dim": 10}, {"head_size": 10}),
        ("llama", {"num_key_value_heads": None}, {"num_kv_heads": 6}),
        ("llama", {"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
        ("llama", {"mlp_bias": True}, {"mlp_bias": True}),
        ("qwen2", {}, {"qkv_bias": True, "output_bias": False, "mlp_bias": False}),
        ("qwen3", {"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
        ("mistral", {"attention_bias": True}, {"qkv_bias": False, "output_bias": False}),
        (
            "gpt2",
            {"layer_norm_epsilon": 1e-6},
            {
                **{"mlp_size": 96, "max_positions": 32, "norm_eps": 1e-6, "num_kv_heads": 6},
                **{"norm": "layernorm", "position": "learned", "tie_embeddings": True},
                **{"qkv_bias": True, "output_bias": True, "mlp_bias": True},
            },
        ),
        ("gpt2", {"n_inner": 50}, {"mlp_size": 50}),
        ("gpt2", {"n_positions": None, "n_ctx": 32}, {"max_positions": 32}),
        ("gpt2", {"n_ctx": 999}, {"max_positions": 32}),
        ("gpt2", {"n_embd": None, "hidden_size": 48}, {"hidden_size": 48}),
        ("gpt2", {"activation_function": "gelu"}, {"mlp": "gelu"}),
        ("gpt2", {"activation_function": "gelu_new"}, {"mlp": "gelu_tanh"}),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh"}, {"mlp": "gelu_tanh"}),
    ],
)
def test_what_keys_mean(family, keys, fields):
    model = read(family, **keys)
    assert {name: getattr(model, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("family", "keys", "windows"),
    [
        ("mistral", {}, [4096, 4096, 4096]),
        ("mistral", {"sliding_window": 5}, [5, 5, 5]),
        ("mistral", {"sliding_window": None}, [None, None, None]),
        ("llama", {"sliding_window": 5}, [None, None, None]),
        ("qwen2", {"sliding_window": 5, "max_window_layers": 1}, [None, None, None]),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            [None, 5, 5],
        ),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5}, [None, None, None]),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            },
            [None, None, 5],
        ),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [5, None, 5],
        ),
    ],
)
def test_sliding_windows(family, keys, windows):
    model = read(family, **keys)
    assert [model.layer_type(layer).window for layer in range(3)] == windows


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("keys", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0, None),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            5e5,
            RopeScaling(type="linear", factor=2.0),
        ),
        (
            {
                "rope_parameters": {
                    **LLAMA3,
                    "rope_type": "llama3",
                    "rope_theta": 9.0,
                    "original_max_position_embeddings": 64,
                }
            },
            9.0,
            RopeScaling(type="llama3", factor=8.0, original_max_positions=64),
        ),
        (
            {
                "max_position_embeddings": 128,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16},
            },
            10000.0,
            RopeScaling(type="yarn", factor=4.0, beta_fast=16.0, original_max_positions=128),
        ),
    ],
)
def test_rope(keys, theta, scaling):
    model = read("llama", **keys)
    assert (model.rope_theta, model.rope_scaling) == (theta, scaling)


def test_yarn_mscale_becomes_the_attention_factor():
    yarn = {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 64,
    }
    scaling = read("llama", rope_scaling=yarn).rope_scaling
    log_factor = 0.1 * math.log(40.0)
    expected = (0.8 * log_factor + 1) / (0.5 * log_factor + 1)
    assert scaling.attention_factor == pytest.approx(expected, rel=1e-12)


def test_dropout_is_accepted_and_reported():
    keys = config_json("gpt2", attn_pdrop=0.1, resid_pdrop=0.0)
    model_fields(keys)
    assert ignored_settings(keys) == ("attn_pdrop 0.1",)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "holds no config.json"),
        ("{", "config.json: not JSON"),
        ("[1]", "not a mapping"),
    ],
)
def test_directories(tmp_path, text, word):
    with pytest.raises(ValueError, match="nothing is downloaded"):
        model_fields(read_config(tmp_path / "meta-llama"))
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=word):
        model_fields(read_config(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config_json("qwen3", head_dim=10)))
    assert model_fields(read_config(tmp_path))["qk_norm"] == "head"


# Export


@pytest.mark.parametrize("name", EXPORTABLE)
def test_presets_survive_the_round_trip(name):
    model = ModelConfig.model_validate(PRESETS[name])
    back = ModelConfig.model_validate(model_fields(hf_config(model, dtype="bf16")))
    if model.position == "learned":
        model = model.model_copy(update={"rope_theta": back.rope_theta})
    assert back.model_dump(exclude={"family"}) == model.model_dump(exclude={"family"})
    beginning = max((word for word in PUBLISHED if name.startswith(word)), key=len)
    assert back.family == PUBLISHED[beginning]


@st.composite
def rotary_models(draw):
    group, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3", "mistral"]))
    layers, heads = draw(st.integers(1, 4)), group * kv_heads
    biased = draw(st.booleans()) if family in ("llama", "qwen3") else False
    window = draw(st.none() | st.integers(1, 99)) if family != "llama" else None
    first = draw(st.integers(0, layers - 1)) if window and family.startswith("qwen") else 0
    scaling = draw(
        st.sampled_from(
            [
                None,
                {"type": "linear", "factor": 2.0},
                {"type": "llama3", "factor": 8.0, "original_max_positions": 32},
                {"type": "yarn", "factor": 4.0, "original_max_positions": 32, "beta_slow": 2.0},
            ]
        )
    )
    return ModelConfig(
        family=family,
        vocab_size=draw(st.integers(1, 300)),
        hidden_size=heads * draw(st.integers(1, 9)),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=2 * draw(st.integers(1, 9)),
        mlp_size=draw(st.integers(1, 99)),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        max_positions=draw(st.integers(1, 999)),
        rope_theta=draw(st.floats(1.0, 1e7, exclude_min=scaling is not None)),  # yarn needs it
        rope_scaling=scaling,
        qk_norm="head" if family == "qwen3" else None,
        qkv_bias=biased or family == "qwen2",
        output_bias=biased,
        mlp_bias=draw(st.booleans()) if family == "llama" else False,
        tie_embeddings=draw(st.booleans()),
        sliding_window=window,
        layer_types=["full"] * first + ["sliding"] * (layers - first) if first else None,
    )


@settings(max_examples=examples(50, all=150), deadline=None)
@given(rotary_models())
def test_every_rotary_model_of_a_family_survives_the_round_trip(model):
    text = json.dumps(hf_config(model, dtype="fp32"))
    assert ModelConfig.model_validate(model_fields(json.loads(text))) == model


@pytest.mark.parametrize(
    ("preset", "changes", "family"),
    [
        ("tiny-test", {}, "llama"),
        ("tiny-test", {"sliding_window": 9}, "mistral"),
        ("tiny-test", {"qkv_bias": True}, "qwen2"),
        ("tiny-test", {"qkv_bias": True, "output_bias": True}, "llama"),
        ("tiny-test", {"qk_norm": True}, "qwen3"),
        ("tiny-test", {"hidden_size": 30, "head_size": 8}, "mistral"),
        ("tiny-gpt", {}, "gpt2"),
        ("mistral-7b", {"family": None, "sliding_window": None}, "llama"),
        ("mistral-7b", {"sliding_window": None}, "mistral"),  # a named family is kept
    ],
)
def test_a_family_is_chosen_when_none_is_named(preset, changes, family):
    model = ModelConfig.model_validate({**PRESETS[preset], **changes})
    assert hf_config(model, dtype="fp32")["model_type"] == family


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "layernorm"}, ["no Hugging Face family", "norm is layernorm, needs rmsnorm"]),
        ({"family": "llama", "output_bias": True}, ["llama: qkv_bias is false, needs true"]),
        ({"position": "learned"}, ["position is learned, needs rotary", "norm is rmsnorm"]),
        ({"family": "llama", "qk_norm": True}, ["llama does not compute", "qk_norm is head"]),
        ({"family": "llama", "sliding_window": 9}, ["sliding_window is 9, needs null"]),
        ({"family": "qwen2"}, ["qkv_bias is false, needs true"]),
        (
            {"family": "mixtral", "experts": {"count": 4, "per_token": 2, "mlp_size": 8}},
            ["experts.normalize is false, needs true"],
        ),
    ],
)
def test_models_that_no_family_holds(changes, words):
    model = ModelConfig.model_validate({**PRESETS["tiny-test"], **changes})
    with pytest.raises(ValueError, match="does not compute|no Hugging Face family") as error:
        hf_config(model, dtype="fp32")
    for word in words:
        assert word in str(error.value)


# Against transformers


@pytest.fixture
def auto_config(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers").AutoConfig


YARN = {"rope_type": "yarn", "factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}
OLDER_KEYS = [
    ("gemma3_text", {"rope_theta": 2e6, "rope_local_base_freq": 5e3, "rope_scaling": LINEAR}),
    ("gemma3_text", {"rope_parameters": {"full_attention": LINEAR}, "sliding_window_pattern": 2}),
    ("olmo3", {"rope_theta": 4e5, "rope_scaling": {**YARN, "attention_factor": 1.2}}),
    ("gpt_oss", {"rope_scaling": None, "rope_theta": 1e5}),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    ("glm4", {"partial_rotary_factor": 0.25}),
    ("smollm3", {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 9}),
    ("qwen2_moe", {"use_sliding_window": True}),
    ("qwen3_moe", {"use_sliding_window": True, "mlp_only_layers": [0]}),
    ("qwen3_next", {"full_attention_interval": 2, "mlp_only_layers": [0], "rope_theta": 1e7}),
    ("qwen3_5_text", {"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5}}),
]


@pytest.mark.parametrize(("family", "keys"), [*((one, {}) for one in FAMILIES), *OLDER_KEYS])
def test_missing_and_older_keys_mean_what_they_mean_in_transformers(auto_config, family, keys):
    sizes = {**SIZES, "hidden_size": 768, "num_attention_heads": 64}
    if family == "gpt2":
        sizes = GPT2_SIZES
    elif family in EXPERTS:
        sizes |= {"num_experts_per_tok": 2, **EXPERTS[family]}
    elif family == "qwen3_5_text":
        sizes |= HYBRID
    elif family == "ministral":
        sizes |= {"head_dim": 12}  # transformers needs it in ministral
    full = auto_config.for_model(family, **copy.deepcopy({**sizes, **keys})).to_dict()
    assert model_fields({"model_type": family, **sizes, **keys}) == model_fields(full)


@pytest.mark.parametrize(
    "name", [name for name in EXPORTABLE if "70b" not in name and "tiny" not in name]
)
def test_transformers_reads_what_we_write(auto_config, name, tmp_path):
    model = ModelConfig.model_validate(PRESETS[name])
    written = hf_config(model, dtype="bf16")
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = auto_config.from_pretrained(tmp_path)
    again = config.to_dict()
    assert model_fields(again) == model_fields(written)
    assert str(config.dtype).endswith("bfloat16")
    assert config.eos_token_id is None
