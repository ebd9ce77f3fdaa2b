"""All families: transformers writes, SPPO reads and writes, transformers reads the same model."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from sppo.config.huggingface.model_config import ignored_settings, model_fields, read_config
from sppo.config.model import ModelConfig
from sppo.model.huggingface.reading import open_hf_weights
from sppo.model.huggingface.stored_tensors import stored_shapes
from sppo.model.huggingface.writing import save_hf_weights
from tests.conftest import succeed
from tests.model.hf_models import EAGER, FAMILIES, LLAMA3, tiny_hf_model

transformers = pytest.importorskip("transformers")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CASES = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"tie_word_embeddings": True, "attention_bias": False, "rope_scaling": YARN}),
    ("llama", {"mlp_bias": False, "rope_scaling": LLAMA3, "rope_theta": 5e5}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("qwen3", {"tie_word_embeddings": False, "attention_bias": True, "rms_norm_eps": 1e-5}),
    ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    ("gpt2", {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": None}),
]


def logits(model):
    tokens = torch.randint(0, 61, (2, 23), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize(("family", "options"), CASES)
def test_round_trip_is_exact(family, options, tmp_path):
    theirs, model = tiny_hf_model(family, **options)
    theirs.save_pretrained(tmp_path / "published", max_shard_size="20KB")
    read = ModelConfig.model_validate(model_fields(read_config(tmp_path / "published")))
    assert read == model

    weights = open_hf_weights(tmp_path / "published", read)
    assert {name: tuple(w.shape) for name, w in weights.items()} == stored_shapes(read)
    assert list(weights) == list(stored_shapes(read))
    save_hf_weights(tmp_path / "ours", weights, read, dtype="fp32", max_shard_bytes=10_000)

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **EAGER).eval()
    for parameter in again.parameters():
        # Products depend on the alignment of memory, which that of a mapped file is not.
        parameter.data = parameter.data.clone()
    assert type(again) is type(theirs)
    expected, actual = theirs.state_dict(), again.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert torch.equal(logits(theirs), logits(again))
    back = ModelConfig.model_validate(model_fields(read_config(tmp_path / "ours")))
    assert back == model
    ours = open_hf_weights(tmp_path / "ours", back)
    assert all(torch.equal(ours[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("family", ["llama", "gpt2", "glm4_moe", "qwen3_next"])
def test_stored_type_is_kept(family, tmp_path):
    theirs, model = tiny_hf_model(family)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "published")
    opened = open_hf_weights(tmp_path / "published", model)
    assert opened.dtype is torch.bfloat16
    save_hf_weights(tmp_path / "ours", opened, model, dtype="bf16")
    published, again = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        for name in ("published", "ours")
    )
    assert again.dtype is torch.bfloat16
    pairs = zip(published.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("original", [True, False])
def test_a_language_model_is_taken_out_of_one_that_sees(original, tmp_path):
    text, model = tiny_hf_model("gemma3_text")
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(),
        vision_config={**vision, "num_attention_heads": 1, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1,
    )
    theirs = transformers.Gemma3ForConditionalGeneration(config)
    theirs.model.language_model.load_state_dict(text.model.state_dict())
    theirs.save_pretrained(tmp_path / "sees", save_original_format=original)
    config = read_config(tmp_path / "sees")
    assert ModelConfig.model_validate(model_fields(config)) == model
    assert ignored_settings(config)[0].startswith("vision_config")
    weights = open_hf_weights(tmp_path / "sees", model)
    save_hf_weights(tmp_path / "ours", weights, model, dtype="fp32")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(again[name], value) for name, value in text.state_dict().items())


TOWER = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "patch_size": 2}
FURTHER = {"mtp.fc.weight": torch.ones(24, 48), "mtp.layers.0.mlp.gate_proj.weight": torch.ones(3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3_5Moe"])
def test_a_hybrid_is_taken_out_of_one_that_sees(name, dtype, tmp_path):
    family = {"Qwen3_5": "qwen3_5_text", "Qwen3_5Moe": "qwen3_5_moe_text"}[name]
    text, _ = tiny_hf_model(family, tie_word_embeddings=False)
    config = getattr(transformers, f"{name}Config")(
        text_config={**text.config.to_dict(), "mtp_num_hidden_layers": 1},
        vision_config={**TOWER, "out_hidden_size": 24, "num_position_embeddings": 4},
        tie_word_embeddings=True,  # of the whole model, which counts
    )
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    theirs.model.language_model.load_state_dict(text.model.state_dict())
    theirs.to(dtype).save_pretrained(tmp_path / "sees")
    # As published: experts in one tensor, rates of decay and the norms of outputs in fp32.
    stored = {key: value for key, value in theirs.state_dict().items() if key != "lm_head.weight"}
    for key in stored:
        if key.endswith(("A_log", "linear_attn.norm.weight")):
            stored[key] = text.state_dict()[key.replace("language_model.", "")]
    path = tmp_path / "sees" / "model.safetensors"
    save_file(stored | FURTHER, path, metadata={"format": "pt"})

    said = succeed("convert", "from-hf", tmp_path / "sees", tmp_path / "ours").replace("\n", " ")
    tower = sum(key.startswith("model.visual.") for key in stored)
    assert f"left out: {tower} tensors of visual, 2 tensors of mtp" in said
    assert "mtp_num_hidden_layers: 0, no layers that predict further tokens" in said
    assert "not applied in training: mtp_num_hidden_layers 1, vision_config" in said
    written = read_config(tmp_path / "ours")
    assert (written["model_type"], written["mtp_num_hidden_layers"]) == (family, 0)
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    expected = {key.replace("language_model.", ""): value for key, value in stored.items()}
    expected = {key: value for key, value in expected.items() if "visual" not in key}
    assert ours.keys() == expected.keys()
    assert all(
        ours[key].dtype == value.dtype and torch.equal(ours[key], value)
        for key, value in expected.items()
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **EAGER)
    assert again.dtype is dtype
    assert torch.isfinite(logits(again)).all()


QKVZ, BA = "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"
LAYOUTS = [
    ("phi3", "k.weight", "self_attn.qkv_proj.weight", lambda w: w[48:64]),
    ("phi3", "up.weight", "mlp.gate_up_proj.weight", lambda w: w[44:]),
    # A head of eight turns its first four dimensions, in pairs (0, 1) and (2, 3).
    ("glm4", "q.bias", "self_attn.q_proj.bias", lambda b: heads(b)[:, [0, 2, 1, 3, 4, 5, 6, 7]]),
    ("mixtral", "expert_up.weight", "mlp.experts.gate_up_proj", lambda w: w[:, 44:]),
    ("gpt_oss", "expert_up.weight", "mlp.experts.gate_up_proj", lambda w: w[:, :, 1::2].mT),
    ("gpt_oss", "expert_gate.bias", "mlp.experts.gate_up_proj_bias", lambda b: b[:, ::2]),
    ("gpt_oss", "expert_down.weight", "mlp.experts.down_proj", lambda w: w.mT),
    # Key heads of 6 queries, 6 keys, 20 values and 20 gates; of 2 betas and 2 decays.
    ("qwen3_next", "linear_q.weight", QKVZ, lambda w: key_heads(w)[:, :6]),
    ("qwen3_next", "linear_k.weight", QKVZ, lambda w: key_heads(w)[:, 6:12]),
    ("qwen3_next", "linear_v.weight", QKVZ, lambda w: key_heads(w)[:, 12:32]),
    ("qwen3_next", "linear_gate.weight", QKVZ, lambda w: key_heads(w)[:, 32:]),
    ("qwen3_next", "linear_beta.weight", BA, lambda w: key_heads(w)[:, :2]),
    ("qwen3_next", "linear_decay.weight", BA, lambda w: key_heads(w)[:, 2:]),
    ("qwen3_5_text", "linear_v.weight", "linear_attn.in_proj_qkv.weight", lambda w: w[24:]),
    ("qwen3_5_text", "linear_decay.weight", "linear_attn.in_proj_a.weight", lambda w: w),
    ("qwen3_5_text", "conv_k.weight", "linear_attn.conv1d.weight", lambda w: w[12:24, 0]),
    ("qwen3_5_text", "attention_gate.bias", "self_attn.q_proj.bias", lambda b: heads(b)[1::2]),
    ("qwen3_5_text", "q.weight", "self_attn.q_proj.weight", lambda w: w.view(6, 2, 8, 24)[:, 0]),
]


def heads(values):
    return values.reshape(-1, 8)


def key_heads(values):
    return values.unflatten(0, (2, -1))


@pytest.mark.parametrize(("family", "ours", "stored", "part"), LAYOUTS)
def test_where_parameters_lie(family, ours, stored, part, tmp_path):
    theirs, model = tiny_hf_model(family)
    theirs.save_pretrained(tmp_path)
    layer = 3 if family == "qwen3_5_text" and "self_attn" in stored else 1
    expected = part(theirs.state_dict()[f"model.layers.{layer}.{stored}"])
    found = open_hf_weights(tmp_path, model)[f"layers.{layer}.{ours}"]
    assert torch.equal(found.reshape(expected.shape), expected)
