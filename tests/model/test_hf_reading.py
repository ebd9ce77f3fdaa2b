"""Contents of a Hugging Face directory, and the refusal of invalid ones."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from sppo.config import PRESETS, ModelConfig
from sppo.model.huggingface.reading import open_hf_weights
from sppo.model.huggingface.writing import save_hf_weights
from sppo.model.initialize import initial_weights
from tests.model.hf_models import tiny_hf_model

LLAMA = ModelConfig.model_validate({**PRESETS["tiny-test"], "tie_embeddings": True})
GPT2 = ModelConfig.model_validate({**PRESETS["tiny-gpt"], "max_positions": 16, "num_layers": 1})


def published(directory, model, *, edit=None):
    """A directory in the standard layout, its tensors changed by ``edit``."""
    weights = initial_weights(model, seed=0)
    save_hf_weights(directory, weights, model, dtype="fp32")
    if edit is not None:
        tensors = load_file(directory / "model.safetensors")
        tensors = edit(tensors) or tensors
        save_file(tensors, directory / "model.safetensors")
    return weights


def without_prefix(tensors):
    return {name.split(".", 1)[1]: tensor for name, tensor in tensors.items()}


def with_masks(tensors):
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.uint8)
    tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)


def with_frequencies(tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


def with_the_tied_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


@pytest.mark.parametrize(
    ("model", "edit"),
    [
        (LLAMA, without_prefix),
        (GPT2, without_prefix),
        (GPT2, with_masks),
        (LLAMA, with_frequencies),
        (LLAMA, with_the_tied_head),
    ],
)
def test_what_other_files_have_or_lack_is_the_same_model(tmp_path, model, edit):
    weights = published(tmp_path / "m", model, edit=edit)
    opened = open_hf_weights(tmp_path / "m", model)
    assert list(opened) == list(weights)
    assert all(torch.equal(opened[name], weights[name]) for name in weights)


def test_another_head_than_the_tied_one_is_refused(tmp_path):
    def add_other(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    published(tmp_path / "other", LLAMA, edit=add_other)
    with pytest.raises(ValueError, match="differs from the embedding"):
        open_hf_weights(tmp_path / "other", LLAMA)


def test_every_wrong_tensor_is_listed(tmp_path):
    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["score.weight"] = torch.ones(2, 32)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(3, 4)
        name = "model.layers.1.input_layernorm.weight"
        tensors[name] = tensors[name].to(torch.int8)

    published(tmp_path / "m", LLAMA, edit=spoil)
    with pytest.raises(ValueError, match="does not hold the weights") as error:
        open_hf_weights(tmp_path / "m", LLAMA)
    text = str(error.value)
    assert "missing: model.norm.weight [32]" in text
    assert "unknown: score.weight [2, 32]" in text
    assert "wrong shape: model.layers.0.mlp.up_proj.weight [3, 4], needs [64, 32]" in text
    assert "model.layers.1.input_layernorm.weight I8" in text
    assert text.endswith("leave out what changes shapes beside model.from_hf")


def test_a_long_list_is_cut(tmp_path):
    published(tmp_path / "m", LLAMA)
    with pytest.raises(ValueError, match="... and ") as error:
        open_hf_weights(tmp_path / "m", GPT2)
    assert len(str(error.value).splitlines()) < 24


def test_one_tensor_under_two_names(tmp_path):
    def twice(tensors):
        tensors["norm.weight"] = tensors["model.norm.weight"].clone()

    published(tmp_path / "m", LLAMA, edit=twice)
    with pytest.raises(ValueError, match=r"holds (model\.)?norm.weight, which model.safetensors"):
        open_hf_weights(tmp_path / "m", LLAMA)


def test_mixed_types_are_widened_to_hold_both(tmp_path):
    def mix(tensors):
        return {n: t if t.dim() == 1 else t.to(torch.bfloat16) for n, t in tensors.items()}

    published(tmp_path / "m", LLAMA, edit=mix)
    assert open_hf_weights(tmp_path / "m", LLAMA).dtype is torch.float32


def test_no_weights_and_pickles(tmp_path):
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        open_hf_weights(tmp_path, LLAMA)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="pytorch_model.bin is a pickle"):
        open_hf_weights(tmp_path, LLAMA)


def test_tensors_outlive_the_files(tmp_path):
    published(tmp_path / "m", LLAMA)
    weights = dict(open_hf_weights(tmp_path / "m", LLAMA))
    before = weights["embed.weight"].clone()
    path = tmp_path / "m" / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(weights["embed.weight"], before)


def test_layers_that_predict_further_tokens_are_skipped(tmp_path):
    theirs, model = tiny_hf_model("glm4_moe")
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    later = {"model.layers.6.eh_proj.weight": torch.ones(4, 8)}
    save_file(load_file(path) | later, path, metadata={"format": "pt"})
    assert "layers.6.eh_proj.weight" not in open_hf_weights(tmp_path, model)
    before = {"model.layers.5.eh_proj.weight": torch.ones(4, 8)}
    save_file(load_file(path) | before, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unknown: model.layers.5.eh_proj"):
        open_hf_weights(tmp_path, model)
