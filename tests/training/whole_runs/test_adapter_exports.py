"""Adapters from a published model through training to PEFT and back, and merged into the model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sppo.config import load_run
from tests.conftest import refuse, succeed
from tests.model.hf_models import log_probabilities, tiny_hf_model
from tests.tiers import default_of
from tests.training.jobs import saved_state, train_alone

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CASES = {
    "llama": {"rank": 3, "alpha": 5, "layers": "1-2"},
    "qwen2": {"rank": 2, "targets": ["q", "down"], "scaling": "rank_stabilized"},
    "qwen3": {"rank": 3, "alpha": 6, "also_train": ["norms", "embed"]},
    "mistral": {"rank": 2, "also_train": ["head"]},
    "gpt2": {"rank": 4, "targets": ["o", "up", "down"], "also_train": ["norms"]},
}
LENGTH, SEQUENCES = 33, 4


@pytest.fixture(scope="module", params=default_of(CASES, "qwen3"))
def tuned(request, tmp_path_factory):
    """Directory with a base ``hf`` and a run ``out`` that has trained an adapter beside it."""
    directory = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        tiny_hf_model(request.param)[0].save_pretrained("hf")
        ids = np.random.default_rng(7).integers(0, 61, size=LENGTH * SEQUENCES + 1, dtype=np.uint16)
        np.save("ids.npy", ids)
        prepare = ("data", "prepare", "--tokenizer", "ids", "--vocab-size", 61)
        succeed(*prepare, "--out", "tokens", "ids.npy")
        settings = {
            "model": {"from_hf": "hf"},
            "data": {"tokens": "tokens", "shuffle": False},
            "sequence": {"length": LENGTH, "num_subsequences": 3, "alignment": 1},
            "adapter": CASES[request.param],
            "optimizer": {"lr": 0.03, "schedule": "constant", "warmup_steps": 0},
            "train": {"steps": 4, "dtype": "fp32", "output": "out"},
        }
        Path("run.yaml").write_text(json.dumps(settings))
        train_alone(load_run("run.yaml"))
    return directory


@pytest.fixture
def run(tuned, tmp_path, monkeypatch):
    """Copy of that directory, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(tuned, tmp_path, dirs_exist_ok=True))


def changed(name, **sections):
    raw = json.loads(Path("run.yaml").read_text())
    for section, keys in sections.items():
        raw[section] = raw.get(section, {}) | keys
    Path(name).write_text(json.dumps(raw))
    return name


def evaluated(*words):
    return json.loads(succeed("eval", *words, "--json"))["loss"]


def loss_of(model):
    """Mean loss of a model of transformers on the sequences of the evaluation."""
    ids = np.load("ids.npy").astype(np.int64)
    pieces = [ids[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(SEQUENCES)]
    return -float(torch.cat([log_probabilities(model, piece) for piece in pieces]).mean())


def published(directory="hf"):
    return transformers.AutoModelForCausalLM.from_pretrained(directory).eval()


def test_peft_computes_what_was_trained_and_training_reads_what_peft_writes(run):
    trained, initial = evaluated("run.yaml"), evaluated("run.yaml", "--initial")
    assert trained < initial - 0.01
    assert initial == pytest.approx(loss_of(published()), rel=1e-5)
    told = json.loads(succeed("convert", "to-peft", "out", "adapter", "--json"))
    assert (told["base"], told["step"], told["dtype"]) == ("hf", 4, "fp32")
    theirs = peft.PeftModel.from_pretrained(published(), "adapter").eval()
    assert loss_of(theirs) == pytest.approx(trained, rel=1e-5)

    theirs.save_pretrained("again")
    continued = changed(
        "continued.yaml",
        adapter={"from_peft": "again"},
        optimizer={"lr": 0},
        train={"output": "continued", "steps": 1},
    )
    assert evaluated(continued, "--initial") == trained
    train_alone(load_run(continued))
    before = saved_state(run / "out/checkpoints/step_000004")
    after = saved_state(run / "continued/checkpoints/step_000001")
    for key, tensor in before.items():
        assert not key.startswith("model.") or torch.equal(after[key], tensor), key

    told = json.loads(succeed("convert", "to-hf", "out", "merged", "--json"))
    assert 0 < told["lost_change"]["share"] < 1e-5
    ours, merged = published("merged").state_dict(), theirs.merge_and_unload().state_dict()
    for name, tensor in ours.items():
        assert torch.allclose(tensor, merged[name], rtol=0, atol=1e-6 * tensor.abs().max()), name
    assert loss_of(published("merged")) == pytest.approx(trained, rel=1e-5)


def test_score_is_that_of_the_adapter(run):
    run_file = changed("documents.yaml", data={"samples": "documents"})
    scored = ("score", run_file, "--tokens", "tokens", "--checkpoint", "out", "-o", "scores.jsonl")
    succeed(*scored, "sequence.length=256", "train.samples_per_step=1")
    (score,) = map(json.loads, Path("scores.jsonl").read_text().splitlines())
    succeed("convert", "to-peft", "out", "adapter")
    theirs = peft.PeftModel.from_pretrained(published(), "adapter").eval()
    expected = log_probabilities(theirs, np.load("ids.npy").astype(np.int64)).sum()
    assert score["logprob"] == pytest.approx(float(expected), rel=1e-5)


def test_positions_that_an_adapter_cannot_carry_are_refused(run):
    if "gpt2" in (run / "hf/config.json").read_text():
        return
    stretched = changed(
        "stretched.yaml",
        model={"rope_theta": 5e5},
        train={"output": "long", "steps": 1},
    )
    train_alone(load_run(stretched))
    assert not (run / "long/checkpoints/step_000001/adapter").exists()
    told = refuse("convert", "to-peft", "long", "adapter")
    assert "an adapter cannot carry rope_theta (model.rope_theta is 500000.0, " in told
    assert "merge with sppo convert to-hf, or write the base with it" in told
    assert not (run / "adapter").exists()
    succeed("convert", "from-hf", "hf", "base", "--rope-scaling-of", "long")
    succeed("convert", "to-peft", "long", "adapter", "--base", "base")
    theirs = peft.PeftModel.from_pretrained(published("base"), "adapter").eval()
    assert loss_of(theirs) == pytest.approx(evaluated(stretched), rel=1e-5)

    shutil.rmtree("base")
    published().bfloat16().save_pretrained("base")
    told = refuse("convert", "to-peft", "out", "other", "--base", "base")
    assert "base holds other weights than hf, beside which the adapter was trained" in told


def test_exports_name_what_they_lack(run):
    (run / "hf/tokenizer.json").write_text("{}")
    (run / "hf/generation_config.json").write_text("{}")
    told = succeed("convert", "to-peft", "out", "adapter")
    assert "adapter: adapter of rank" in told
    assert "base: hf" in told
    assert "copied: tokenizer.json\n" in told
    assert "missing: chat template" in told
    assert {path.name for path in (run / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    }
    assert len(load_file(run / "adapter/adapter_model.safetensors")) > 0
    full = changed("full.yaml", train={"output": "full", "steps": 1})
    raw = json.loads(Path(full).read_text())
    del raw["adapter"]
    Path(full).write_text(json.dumps(raw))
    train_alone(load_run(full))
    told = refuse("convert", "to-peft", "full", "other")
    assert "full was trained without an adapter: sppo convert to-hf writes its weights" in told
    shutil.rmtree("hf")
    told = refuse("convert", "to-hf", "out", "other")
    assert "the others cannot be read from hf: hf" in told
    assert not (run / "other").exists()
