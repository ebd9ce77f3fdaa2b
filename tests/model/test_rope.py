"""Rotary frequencies and tables against transformers' own, at published and at tiny settings."""

import pytest
import torch

from sppo.config import PRESETS
from sppo.config.huggingface.model_config import model_fields
from sppo.config.model import ModelConfig
from sppo.model.rope import rotary_frequencies, rotary_table
from tests.model import hf_models

transformers = pytest.importorskip("transformers")

LLAMA3 = {**hf_models.LLAMA3, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CASES = {
    "default": (128, 10_000.0, None),
    "default, theta 5e5": (64, 500_000.0, None),
    "tiny head": (2, 10_000.0, None),
    "linear": (96, 10_000.0, {"rope_type": "linear", "factor": 2.5}),
    "llama3": (128, 500_000.0, LLAMA3),
    "llama3, factor 32": (64, 500_000.0, {**LLAMA3, "factor": 32.0}),
    "llama3, narrow blend": (64, 10_000.0, {**LLAMA3, "low_freq_factor": 2.0}),
    "yarn": (128, 1_000_000.0, YARN),
    "yarn, ramp": (64, 10_000.0, {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}),
    "yarn, attention factor": (64, 10_000.0, {**YARN, "attention_factor": 0.7}),
    "yarn, mscale": (64, 10_000.0, {**YARN, "mscale": 0.8, "mscale_all_dim": 1.4}),
    "yarn, no whole pairs": (64, 10_000.0, {**YARN, "truncate": False}),
    "yarn, both beyond the head": (16, 10.0, YARN),
    "yarn, factor 1": (64, 10_000.0, {**YARN, "factor": 1.0}),
}


def both(case, monkeypatch):
    """(transformers' rotary embedding, our model) of one setting."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    head_size, theta, scaling = CASES[case]
    config = transformers.LlamaConfig(
        hidden_size=2 * head_size,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=head_size,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", **(scaling or {}), "rope_theta": theta},
    )
    model = ModelConfig.model_validate(model_fields(config.to_dict()))
    return LlamaRotaryEmbedding(config), model


@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_theirs(case, monkeypatch):
    """To the last bit in fp32; a YaRN that stretches by one blends a number with itself."""
    theirs, model = both(case, monkeypatch)
    frequencies, scale = rotary_frequencies(
        model, model.layer_type(0).rotation, dtype=torch.float32
    )
    assert frequencies.dtype is torch.float32
    rounding = 1.2e-7 if case == "yarn, factor 1" else 0
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=rounding, atol=0)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_tables_are_theirs_at_far_positions(case, monkeypatch):
    """Angles reach 131071 radians, where fp32 steps by 2^-7: only the same operations agree.

    1e-6 where the frequencies agree to the last bit, their rounding times the position elsewhere.
    """
    theirs, model = both(case, monkeypatch)
    positions = torch.tensor([0, 1, 2, 1000, 65_535, 131_071])
    cos, sin = theirs(torch.zeros(1), positions[None])
    table = rotary_table(model, model.layer_type(0).rotation, positions, dtype=torch.float32)
    half = model.head_dim // 2
    frequencies, _ = rotary_frequencies(model, model.layer_type(0).rotation, dtype=torch.float32)
    slack = (frequencies - theirs.inv_freq).abs() * 131_072 * 2
    for ours, expected in ((table.cos, cos), (table.sin, sin)):
        error = (ours[:, 0] - expected[0, :, :half]).abs()
        assert torch.all(error <= 1e-6 + slack)


def test_float64_models_get_float64_angles_and_bf16_models_fp32():
    model = ModelConfig.model_validate(PRESETS["llama-3.2-1b"])
    wide = rotary_table(
        model, model.layer_type(0).rotation, torch.tensor([131_071]), dtype=torch.float64
    )
    narrow = rotary_table(
        model, model.layer_type(0).rotation, torch.tensor([131_071]), dtype=torch.bfloat16
    )
    assert (wide.cos.dtype, narrow.cos.dtype) == (torch.float64, torch.float32)
    error = (wide.cos - narrow.cos.double()).abs().max()
    assert 1e-9 < error < 0.02
