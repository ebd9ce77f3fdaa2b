"""Train adapters beside PEFT, and freeze weights beside transformers, as a user does it.

PEFT and torch.optim.AdamW do the same five steps on whole sequences, from the same random adapter,
on answers alone. Every tensor that trains agrees to 1e-4 of its largest value (fp32) or 2e-2
(bf16); all others are what they were, bit for bit.
"""

import re
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import succeed
from tests.model.hf_models import tiny_hf_model
from tests.test_hf_training import (
    STEPS,
    WARM_UP_COSINE,
    Case,
    assert_same_metrics,
    assert_same_weights,
    exported,
    loss_of,
    train_ours,
    train_theirs,
    validations,
)
from tests.tiers import default_of

peft = pytest.importorskip("peft")

TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (5e-3, 2e-2)}
"""Of losses, and of tensors as a share of their largest value."""
BF16 = {"dtype": "bf16", "eps": 1e-3}
NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
LAYERS = {"layers_to_transform": [1, 2]}


@dataclass(frozen=True)
class Adapted:
    """A case, and what PEFT calls its adapter."""

    case: Case
    lora: dict


def adapted(family, lora, *, options=None, rank=3, alpha=6, **case):
    """An adapter of a rank, in the words of PEFT (``lora``) and in ours (``case``)."""
    adapter = {"rank": rank, "alpha": alpha, **case.pop("adapter", {})}
    case = Case(family, options or {}, answers=True, adapter=adapter, **case)
    return Adapted(case, {"r": rank, "lora_alpha": alpha, **lora})


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "llama": adapted("llama", {"target_modules": ALL}, policy="recompute"),
    "llama, bf16": adapted("llama", {"target_modules": ALL}, **BF16),
    "llama, some layers": adapted(
        "llama",
        {"target_modules": ["v_proj", "up_proj"], **LAYERS, "use_rslora": True},
        adapter={"targets": ["v_proj", "up_proj"], "layers": "1-2", "scaling": "rank_stabilized"},
        policy="keep_attention",
    ),
    "qwen2, embedding and head": adapted(
        "qwen2",
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        adapter={"targets": ["v"], "also_train": ["embed", "head"]},
        cut="even",
        sequences_per_step=2,
    ),
    "qwen3, norms": adapted(
        "qwen3",
        {
            "target_modules": ["o_proj", "k_proj"],
            "modules_to_save": [*NORMS, "q_norm", "k_norm"],
            "use_rslora": True,
        },
        adapter={"targets": "k,o", "also_train": ["norms"], "scaling": "rank_stabilized"},
        cut="flops",
        rates=WARM_UP_COSINE,
    ),
    "qwen3, bf16": adapted("qwen3", {"target_modules": ALL}, cut="flops", **BF16),
    "mistral": adapted("mistral", {"target_modules": ALL}, rank=5, sequences_per_step=2),
    "gpt2": adapted(
        "gpt2",
        {"target_modules": ["c_fc", "mlp.c_proj"], "fan_in_fan_out": True},
        adapter={"targets": ["up", "down"]},
        rates=WARM_UP_COSINE,
        policy="recompute",
    ),
    "gpt2, all projections of outputs": adapted(
        "gpt2",
        {"target_modules": ["c_fc", "c_proj"], "fan_in_fan_out": True},
        adapter={"targets": ["o", "up", "down"]},
        cut="flops",
    ),
}


def trained_of(model):
    """Copies of what trains, by the names that PEFT writes."""
    state = peft.get_peft_model_state_dict(model)
    return {name: value.detach().clone() for name, value in state.items()}


@torch.no_grad()
def random_adapter(model, lora):
    """A PEFT model whose factors, both of them, and whole tensors are random."""
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", default_of(CASES, "qwen3, norms"))
def test_five_steps_are_those_of_peft(name, tmp_path):
    case, lora = CASES[name].case, CASES[name].lora
    torch.manual_seed(3)
    base, _ = tiny_hf_model(case.family, seed=11, **case.options)
    if case.dtype == "bf16":
        base = base.bfloat16().float()
    base.save_pretrained(tmp_path / "published")
    theirs = random_adapter(base, lora)
    theirs.save_pretrained(tmp_path / "adapter")
    case.adapter["from_peft"] = str(tmp_path / "adapter")
    before, at_start = trained_of(theirs), loss_of(case, theirs)
    lines = train_ours(case, tmp_path)
    succeed("convert", "to-peft", tmp_path / "run", tmp_path / "exported")
    of_loss, of_tensor = TOLERANCES[case.dtype]
    assert_same_metrics(lines, train_theirs(case, theirs), tolerance=of_loss)
    ours = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    assert_same_weights(ours, trained_of(theirs), before, tolerance=of_tensor)
    expected = {0: at_start, STEPS: loss_of(case, theirs)}
    assert validations(tmp_path) == pytest.approx(expected, rel=of_loss)


FROZEN = {
    "llama, upper layers": (
        Case("llama", keys={"train.only": ["layers.2.*", "*norm*"]}),
        r"model\.layers\.2\.|norm",
    ),
    "gpt2, biases": (Case("gpt2", keys={"train.only": ["*.bias"]}, policy="recompute"), r"\.bias$"),
    "mistral, head": (Case("mistral", keys={"train.only": ["head.*"]}), r"lm_head\."),
}
"""A case with ``train.only``, and what it means in the names of transformers."""


@pytest.mark.parametrize("name", default_of(FROZEN))
def test_what_is_frozen_stays(name, tmp_path):
    case, pattern = FROZEN[name]
    theirs, _ = tiny_hf_model(case.family, seed=11)
    theirs.save_pretrained(tmp_path / "published")
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    for parameter_name, parameter in theirs.named_parameters():
        parameter.requires_grad_(re.search(pattern, parameter_name) is not None)
    lines = train_ours(case, tmp_path)
    assert_same_metrics(lines, train_theirs(case, theirs))
    ours, expected = exported(tmp_path).state_dict(), theirs.state_dict()
    frozen = [key for key in expected if not re.search(pattern, key)]
    assert frozen
    for key in frozen:
        assert torch.equal(ours.pop(key), expected.pop(key)), key
    assert_same_weights(ours, expected, before)
