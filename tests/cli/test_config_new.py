"""``sppo config new``: the run file that it prints is accepted as it is, and trains."""

import json

import pytest

from sppo.config import load_run
from sppo.config.model import ModelConfig
from sppo.config.model.presets import PRESETS
from sppo.model.huggingface.writing import save_hf_weights
from sppo.model.initialize import initial_weights
from tests.cli.answers import one_line
from tests.conftest import refuse, succeed, write_tokens

KINDS = ("sft", "pretrain", "extend")
REACH = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Directory of a tiny Hugging Face model."""
    shape = {**PRESETS["tiny-test"], "family": "llama", "vocab_size": 32, "max_positions": REACH}
    config = ModelConfig.model_validate(shape)
    directory = tmp_path_factory.mktemp("model") / "tiny"
    save_hf_weights(directory, initial_weights(config, seed=0), config, dtype="bf16")
    return directory


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "chat", num_tokens=4096, documents=range(100, 4096, 100))
    return "chat"


def _new(kind, model, *words):
    return succeed("config", "new", kind, "--model", model, "--data", "chat", *words)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_accepted_as_it_is_and_trains(kind, model, data, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(_new(kind, model, "train.dtype=fp32"))
    assert "no problems" in succeed("config", "check", "run.yaml")
    succeed("train", "run.yaml", "train.epochs=0.01")
    assert (tmp_path / f"runs/chat-{kind}/metrics.jsonl").exists()


def test_held_out_data_is_validated_and_evaluated(data, tmp_path):
    write_tokens(tmp_path / "held", num_tokens=900)
    (tmp_path / "run.yaml").write_text(_new("pretrain", "tiny", "--held-out", "held"))
    run = load_run(tmp_path / "run.yaml")
    assert [one.tokens for one in run.evaluated_sets.values()] == [run.data.eval_tokens] == ["held"]


def test_length_and_steps_follow_from_the_data(model, data, tmp_path):
    text = _new("sft", model)
    (tmp_path / "run.yaml").write_text(text)
    run = load_run(tmp_path / "run.yaml")
    assert run.sequence.length == 99
    assert run.train.samples_per_step == 4
    assert run.train.epochs == 2
    assert "# 21 steps" in text
    assert "length: longest" in text
    assert run.parallel.open_degrees == ()
    assert "# 41 documents, 4.1k tokens, all labels count" in text
    assert "# track: {to: wandb}" in text
    text = _new("sft", model, "sequence.length=95", "track.to=wandb")
    assert "longer: drop" in text
    assert "# without 40 longer documents of up to 99 tokens" in text
    assert "# track:" not in text
    text = _new("sft", model, "train.steps=5", "train.tokens_per_step=99")
    assert not any(key in text for key in ("epochs", "samples_per_step"))


def test_an_extension_stretches_to_the_length_asked_for(model, data, tmp_path):
    text = _new("extend", model, f"sequence.length={3 * REACH}")
    assert f"original_max_positions: {REACH}}}  # 3 times 256 positions" in text
    (tmp_path / "run.yaml").write_text(text)
    run = load_run(tmp_path / "run.yaml")
    assert run.model.rope_scaling.type == "yarn"
    assert run.model.context_reach == run.sequence.length == 3 * REACH


@pytest.mark.parametrize("kind", ["sft", "extend"])
def test_adapters_that_are_asked_for_have_a_rate_of_their_own(kind, model, data, tmp_path):
    text = _new(kind, model, "adapter.rank=4")
    (tmp_path / "run.yaml").write_text(text)
    run = load_run(tmp_path / "run.yaml")
    assert (run.adapter.rank, run.optimizer.lr) == (4, 2e-4)
    assert run.adapter.also_train == (("norms", "embed") if kind == "extend" else ())
    hints = json.loads(succeed("config", "check", "run.yaml", "--json"))["hints"]
    assert [hint.partition(" ")[0] for hint in hints] == ["vLLM"] * (kind == "extend")
    assert "# adapter: {rank: 16}" in _new(kind, model)
    assert _new(kind, model, "adapter.rank=4", "optimizer.lr=1e-3").count("lr: 0.001\n") == 1


def test_degrees_are_those_of_the_machine_that_is_named(data, tmp_path):
    machine = ("hardware.preset=h100", "hardware.devices_per_node=4")
    (tmp_path / "run.yaml").write_text(
        _new("pretrain", "tiny", *machine, "train.sequences_per_step=4")
    )
    assert load_run(tmp_path / "run.yaml").parallel.open_degrees == ()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sfft", "--model", "tiny", "--data", "chat"], "sfft: no such kind of run; write sft"),
        (["sft", "--data", "chat"], "--model DIR and --data DIR are needed"),
        (["sft", "--model", "tinny", "--data", "chat"], "Did you mean 'tiny'?"),
        (["sft", "--model", "models/tiny", "--data", "chat"], "models/tiny: no such directory"),
        (["sft", "--model", "tiny", "--data", "chatt"], "chatt: no such directory"),
        (["sft", "--model", "tiny", "--data", "chat", "train.stepss=3"], "Did you mean 'steps'?"),
        (["extend", "--model", "tiny", "--data", "chat"], "few for one sequence"),
        (["extend", "--model", "tiny", "--data", "chat", "sequence.length=64"], "write more"),
        (["extend", "--model", "tiny-gpt", "--data", "chat"], "needs rotary positions"),
    ],
)
def test_what_no_file_can_be_made_of(data, words, says):
    assert says in refuse("config", "new", *words)


def test_check_hints_at_a_learning_rate_for_random_weights(model, data, tmp_path):
    (tmp_path / "run.yaml").write_text(_new("pretrain", model))
    assert "hint" not in succeed("config", "check", "run.yaml")
    told = one_line(succeed("config", "check", "run.yaml", "optimizer.lr=1e-4"))
    assert "run.yaml: no problems hint: optimizer.lr 0.0001 is one for random weights" in told
    (hint,) = json.loads(succeed("config", "check", "run.yaml", "optimizer={}", "--json"))["hints"]
    assert hint.startswith("optimizer.lr 0.0003 (the default) is one for random weights")
    words = ("model={preset: tiny}", "optimizer={}")
    assert "hint" not in succeed("config", "check", "run.yaml", *words)
