"""Adapters in the files of PEFT, written for PEFT and read from PEFT, and merged as PEFT does."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sppo.config.adapter import AdapterConfig
from sppo.cost.trainable import trainable_of
from sppo.model.huggingface.merged_weights import MergedWeights
from sppo.model.huggingface.peft_weights import open_adapter, save_adapter
from sppo.model.huggingface.reading import open_hf_weights
from sppo.model.huggingface.writing import save_hf_weights
from tests.model.hf_models import tiny_hf_model
from tests.tiers import default_of

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CASES = {
    "llama": {"rank": 3, "alpha": 5.5, "layers": "1-2"},
    "qwen2": {"rank": 2, "targets": ["q_proj", "down_proj"], "scaling": "rank_stabilized"},
    "qwen3": {"rank": 3, "alpha": 6, "also_train": ["norms", "embed"]},
    "mistral": {"rank": 2, "targets": ["v"], "also_train": ["head"]},
    "gpt2": {"rank": 4, "alpha": 2, "targets": ["o", "up", "down"], "also_train": ["norms"]},
    "glm4": {"rank": 3, "targets": ["q", "k", "down"], "also_train": ["norms"]},
    "glm4_moe": {"rank": 2, "targets": ["q", "k", "v", "o"]},
    "qwen3_5_text": {"rank": 2, "targets": ["k", "o", "down"], "also_train": ["norms"]},
}
"""Section ``adapter`` by family. The embedding of qwen3 is tied."""


def adapter_of(family):
    return AdapterConfig.model_validate(CASES[family])


def trained(model, adapter, *, seed=5):
    """Random values of all that trains."""
    generator = torch.Generator().manual_seed(seed)
    shapes = trainable_of(adapter, None, model=model).trained_shapes(model)
    return {n: torch.randn(shape, generator=generator) * 0.3 for n, shape in shapes.items()}


def base_weights(hf_model, model, directory):
    """Weights of a model of transformers, by our names."""
    hf_model.save_pretrained(directory)
    return dict(open_hf_weights(directory, model))


@pytest.mark.parametrize(
    "family", default_of(CASES, "qwen3", "gpt2", "glm4", "glm4_moe", "qwen3_5_text")
)
def test_peft_reads_merges_and_writes_what_we_write(family, tmp_path):
    hf_model, model = tiny_hf_model(family)
    adapter = adapter_of(family)
    weights = trained(model, adapter)
    base = base_weights(hf_model, model, tmp_path / "base")
    save_adapter(tmp_path / "a", weights, model, adapter, base=str(tmp_path / "base"))

    theirs = peft.PeftModel.from_pretrained(hf_model, tmp_path / "a")
    theirs.save_pretrained(tmp_path / "again")
    ours, again = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("a", "again")
    )
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[key], again[key]) for key in ours)
    back = open_adapter(tmp_path / "again", model, adapter)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)

    tokens = torch.arange(40)[None] % 61
    with torch.no_grad():
        expected = theirs(tokens).logits
    merged = MergedWeights(base | weights, trainable_of(adapter, None, model=model).adapter)
    save_hf_weights(tmp_path / "merged", merged, model, dtype="fp32")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        found = loaded(tokens).logits
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * expected.abs().max())
    assert 0 < merged.lost.share < 1e-5
    unloaded = theirs.merge_and_unload().state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.allclose(tensor, unloaded[name], rtol=0, atol=1e-6 * tensor.abs().max()), name


def test_bf16_is_rounded_once(tmp_path):
    hf_model, model = tiny_hf_model("llama")
    adapter = adapter_of("llama")
    weights = trained(model, adapter)
    base = base_weights(hf_model.bfloat16(), model, tmp_path / "base")
    merged = MergedWeights(
        base | weights,
        trainable_of(adapter, None, model=model).adapter,
        rounded_to=torch.bfloat16,
    )
    save_hf_weights(tmp_path / "merged", merged, model, dtype="bf16")
    found = open_hf_weights(tmp_path / "merged", model)
    for name, weight in base.items():
        expected = weight.double()
        if f"{name.removesuffix('weight')}lora_a" in weights:
            a, b = (weights[name.removesuffix("weight") + f] for f in ("lora_a", "lora_b"))
            expected = expected + 5.5 / 3 * b.double() @ a.double()
        ulp = torch.finfo(torch.bfloat16).eps * expected.abs()
        assert ((found[name].double() - expected).abs() <= 0.501 * ulp).all(), name
    assert 1e-4 < merged.lost.share < 1e-2


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """An adapter that PEFT has made and saved of a tiny qwen3, and the section that fits it."""
    hf_model, model = tiny_hf_model("qwen3", tie_word_embeddings=False)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        modules_to_save=["embed_tokens"],
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(hf_model, config)
    directory = tmp_path_factory.mktemp("peft") / "adapter"
    theirs.save_pretrained(directory)
    section = AdapterConfig(rank=4, alpha=8, also_train=("embed",))
    return directory, model, section, theirs


def test_adapter_of_peft_is_read(written):
    directory, model, section, theirs = written
    found = open_adapter(directory, model, section)
    state = theirs.state_dict()
    for name, ours in (
        ("q_proj.lora_A", "q.lora_a"),
        ("q_proj.lora_B", "q.lora_b"),
    ):
        key = f"base_model.model.model.layers.2.self_attn.{name}.default.weight"
        assert torch.equal(found[f"layers.2.{ours}"], state[key])
    key = "base_model.model.model.embed_tokens.modules_to_save.default.weight"
    assert torch.equal(found["embed.weight"], state[key])


OTHER_SECTIONS = {
    "rank": ({"rank": 8}, r"adapter.rank is 8, r is 4 there: write adapter.rank=4"),
    "alpha": ({"alpha": 4}, r"the scale is 1, 2 there: write adapter.alpha=8 adapter.scaling=st"),
    "scaling": ({"scaling": "rank_stabilized"}, r"the scale is 4, 2 there"),
    "targets": (
        {"targets": ("q",)},
        r"adapter.targets is \[q\], \[q, k, .* write adapter.targets=\[q,k,",
    ),
    "layers": ({"layers": (0, 2)}, r"layers is \[0, 2\], \[0, 1, 2\] there: write .*=\[0,1,2"),
    "also_train": (
        {"also_train": ()},
        r"also_train is \[\], \[embed\] there: .*also_train=\[embed\]",
    ),
}


@pytest.mark.parametrize("case", OTHER_SECTIONS)
def test_section_that_does_not_fit_is_refused(written, case):
    directory, model, section, _ = written
    changed, message = OTHER_SECTIONS[case]
    with pytest.raises(ValueError, match=message):
        open_adapter(directory, model, section.model_copy(update=changed))


SETTINGS = {
    "use_dora": True,
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8},
    "bias": "lora_only",
    "peft_type": "IA3",
    "task_type": "SEQ_CLS",
    "init_lora_weights": "pissa",
    "loftq_config": {"loftq_bits": 4},
    "lora_bias": True,
    "something_new": True,
}


@pytest.mark.parametrize("key", SETTINGS)
def test_other_kinds_of_adapters_are_refused(written, key, tmp_path):
    directory, model, section, _ = written
    shutil.copytree(directory, tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: SETTINGS[key]}))
    with pytest.raises(ValueError, match=f"adapter_config.json has {key}=.*only plain LoRA"):
        open_adapter(tmp_path / "a", model, section)


def _without_one(tensors):
    del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]


def _with_one_more(tensors):
    tensors["base_model.model.model.layers.1.mlp.up_proj.lora_magnitude_vector"] = torch.ones(3)


def _empty_factor(tensors):
    tensors["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"] = torch.ones(0)


DAMAGED_TENSORS = {
    "missing": (_without_one, r"missing: .*layers.1.mlp.up_proj.lora_B.weight \[44, 4\]"),
    "unknown": (_with_one_more, r"unknown: .*lora_magnitude_vector \[3\]"),
    "sharded": (_empty_factor, r"wrong shape: .*up_proj.lora_A.weight \[0\], needs \[4, 24\]"),
    "empty": (dict.clear, "holds no tensor"),
}


@pytest.mark.parametrize("case", DAMAGED_TENSORS)
def test_other_tensors_are_refused(written, case, tmp_path):
    directory, model, section, _ = written
    shutil.copytree(directory, tmp_path / "a")
    path = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(path)
    change, message = DAMAGED_TENSORS[case]
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message):
        open_adapter(tmp_path / "a", model, section)


def test_damaged_and_missing_files_are_refused(written, tmp_path):
    directory, model, section, _ = written
    shutil.copytree(directory, tmp_path / "a")
    path = tmp_path / "a" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="adapter_model.safetensors is damaged"):
        open_adapter(tmp_path / "a", model, section)
    path.rename(path.with_name("adapter_model.bin"))
    with pytest.raises(ValueError, match="holds no adapter_model.safetensors; .*is a pickle"):
        open_adapter(tmp_path / "a", model, section)
    with pytest.raises(ValueError, match="holds no adapter_config.json"):
        open_adapter(tmp_path, model, section)


def test_copies_of_a_tied_embedding_that_differ_are_refused(tmp_path):
    _, model = tiny_hf_model("qwen3")
    adapter = adapter_of("qwen3")
    save_adapter(tmp_path / "a", trained(model, adapter), model, adapter, base=None)
    path = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.lm_head.weight"] += 1
    save_file(tensors, path)
    with pytest.raises(ValueError, match="an embedding and a lm_head.weight that differ"):
        open_adapter(tmp_path / "a", model, adapter)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt2", "no adapters of q: .*as one tensor, c_attn; leave them"),
        ("qwen3_5_text", "no adapters of q: .*q, attention_gate as one tensor, q_proj; leave"),
        ("glm4_moe", "no adapters of gate: PEFT takes gate_proj for projections of experts; leave"),
    ],
)
def test_projections_that_peft_cannot_name_are_refused(family, words, tmp_path):
    _, model = tiny_hf_model(family)
    adapter = AdapterConfig(rank=2)
    with pytest.raises(ValueError, match=words):
        save_adapter(tmp_path / "a", trained(model, adapter), model, adapter, base=None)
    assert not (tmp_path / "a").exists()
