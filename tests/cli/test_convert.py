import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from sppo.checkpoint import checkpoint
from sppo.checkpoint.checkpoint import CheckpointManager
from sppo.checkpoint.files import run_metadata
from sppo.checkpoint.newest import Checkpoint
from sppo.cli.convert import app
from sppo.config import PRESETS, ModelConfig
from sppo.config.huggingface.model_config import model_fields, read_config
from sppo.model.huggingface import writing as hf_writing
from sppo.model.huggingface.reading import open_hf_weights
from sppo.model.huggingface.writing import save_hf_weights
from sppo.model.initialize import initial_weights
from tests.make import make_run

MODEL = ModelConfig.model_validate({**PRESETS["tiny-test"], "family": "mistral"})


def convert(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def listing(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.fixture
def published(tmp_path):
    """A Hugging Face directory with a tokenizer, token ids and dropout."""
    source = tmp_path / "published"
    save_hf_weights(
        source,
        initial_weights(MODEL, seed=0),
        MODEL,
        dtype="bf16",
        token_ids={"eos_token_id": [1, 2]},
        extra_files={"tokenizer.json": b"{}"},
    )
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    return source


def run_config(**model):
    return make_run(MODEL.model_dump(mode="json") | model, train={"dtype": "bf16"})


def save_checkpoint(output, *, steps=(3,), **model):
    config = run_config(**model)
    manager = CheckpointManager(output / "checkpoints", keep=3, async_save=False)
    for step in steps:
        weights = initial_weights(config.model, seed=step)
        manager.save(
            {f"model.{name}": weight for name, weight in weights.items()},
            step=step,
            metadata=run_metadata(config, sequences_consumed=step),
        )
    return output


# from-hf


def test_from_hf_checks_and_reshards(published, tmp_path):
    done = convert("from-hf", published, tmp_path / "m", "--max-shard-size", "10KiB", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["family"] == "mistral"
    assert report["dtype"] == "bf16"
    assert report["total_bytes"] == 2 * report["num_parameters"]
    assert report["copied"] == ["tokenizer.json"]
    assert report["ignored"] == ["attention_dropout 0.1"]
    assert set(listing(tmp_path / "m")) == {
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        *report["files"],
    }
    assert model_fields(read_config(tmp_path / "m")) == model_fields(read_config(published))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["eos_token_id"] == [1, 2]
    before, after = (open_hf_weights(d, MODEL) for d in (published, tmp_path / "m"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_from_hf_changes_the_type(published, tmp_path):
    done = convert("from-hf", published, tmp_path / "m", "--dtype", "fp32")
    assert done.exit_code == 0
    assert "mistral, " in done.stdout
    assert "in fp32" in done.stdout
    assert "in 1 file\n" in done.stdout
    assert "not applied in training: attention_dropout 0.1" in done.stdout
    assert open_hf_weights(tmp_path / "m", MODEL)["embed.weight"].dtype is torch.float32


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"model_type": "bloom"}, "supported: llama, qwen2, qwen3, mistral, gpt2"),
        ({"rms_norm_eps": 0}, "model.norm_eps"),
        ({"intermediate_size": 65}, "wrong shape: model.layers.0.mlp.gate_proj.weight [64, 32]"),
    ],
)
def test_from_hf_refuses_another_model(edit, message, published, tmp_path):
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(config | edit))
    before = listing(tmp_path)
    done = convert("from-hf", published, tmp_path / "m")
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) < 24
    assert done.stdout == ""
    assert listing(tmp_path) == before


def test_from_hf_refuses_bad_words(published, tmp_path):
    for words, message in [
        ((published, published), "is not empty"),
        ((published, tmp_path / "m", "--max-shard-size", "big"), "not a size"),
        ((published, tmp_path / "m", "--dtype", "int8"), "int8"),
    ]:
        done = convert("from-hf", *words)
        assert done.exit_code == 2, message
        assert message in done.stderr
    assert listing(tmp_path) == ["published", *(f"published/{n}" for n in listing(published))]


def test_from_hf_without_space(published, tmp_path, monkeypatch):
    monkeypatch.setattr(
        hf_writing.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20 + 5)
    )
    done = convert("from-hf", published, tmp_path / "m")
    assert done.exit_code == 4
    assert "1.0 MiB are free" in done.stderr
    assert not (tmp_path / "m").exists()


# to-hf


def test_to_hf_takes_the_newest_checkpoint_or_one(tmp_path):
    output = save_checkpoint(tmp_path / "run", steps=(3, 5))
    one = output / "checkpoints" / "step_000003"
    for source, step, dtype in ((output, 5, torch.bfloat16), (one, 3, torch.float32)):
        target, words = tmp_path / f"m{step}", () if step == 5 else ("--dtype", "fp32")
        done = convert("to-hf", source, target, "--json", *words)
        assert done.exit_code == 0, done.output
        report = json.loads(done.stdout)
        assert (report["step"], report["family"]) == (step, "mistral")
        expected, stored = initial_weights(MODEL, seed=step), open_hf_weights(target, MODEL)
        assert all(torch.equal(stored[name], w.to(dtype)) for name, w in expected.items())


ALL = ["tokenizer", "chat template", "generation_config.json"]
IDS = ["bos_token_id", "eos_token_id", "pad_token_id"]


@pytest.mark.parametrize(
    ("files", "copied", "missing", "endless"),
    [
        (
            {
                "config.json": {"eos_token_id": [1, 2]},
                "tokenizer.json": {},
                "tokenizer_config.json": {"chat_template": "{{ messages }}"},
                "generation_config.json": {"eos_token_id": 2, "pad_token_id": 0},
            },
            ["generation_config.json", "tokenizer.json", "tokenizer_config.json"],
            ["bos_token_id"],
            None,
        ),
        (
            {"config.json": {"eos_token_id": [1, 2]}, "chat_template.jinja": {}, "README.md": {}},
            ["chat_template.jinja"],
            ["tokenizer", "generation_config.json", "bos_token_id", "pad_token_id"],
            None,
        ),
        # transformers reads generation_config.json alone where there is one.
        (
            {"config.json": {"eos_token_id": 2}, "merges.txt": {}, "generation_config.json": {}},
            ["generation_config.json", "merges.txt"],
            ["chat template", "bos_token_id", "pad_token_id"],
            "generation_config.json",
        ),
        ({"config.json": {}}, [], ALL + IDS, "config.json"),
        (None, [], ALL + IDS, "config.json"),
    ],
)
def test_to_hf_takes_what_belongs_to_the_model_it_started_from(
    files, copied, missing, endless, tmp_path, monkeypatch
):
    origin = tmp_path / "origin"
    for name, content in (files or {}).items():
        origin.mkdir(exist_ok=True)
        (origin / name).write_text(json.dumps(content))
    config = run_config().model_dump(mode="json")
    config["model"]["from_hf"] = str(origin)
    monkeypatch.setattr("sppo.cli.convert.check_any", lambda path: None)
    stored = Checkpoint(tmp_path, 1, {"config": config}), initial_weights(MODEL, seed=3)
    monkeypatch.setattr(checkpoint, "read_weights", lambda path: stored)
    done = convert("to-hf", tmp_path, tmp_path / "m", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["copied"] == copied
    assert list(report["missing"]) == missing
    assert all(str(origin) in reason for reason in report["missing"].values())
    assert (endless is None) == ("never stop generating" not in done.stderr)
    assert done.stderr.startswith("" if endless is None else f"warning: {endless} has no eos_")
    assert set(copied) < {path.name for path in (tmp_path / "m").iterdir()}
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    assert [key for key in IDS if written[key] is None] == [key for key in IDS if key in missing]
    eos = (files or {}).get("config.json") or {}
    assert json.dumps(written["eos_token_id"]) == json.dumps(eos.get("eos_token_id"))


def test_to_hf_of_random_weights_says_what_is_missing(tmp_path):
    done = convert("to-hf", save_checkpoint(tmp_path / "run"), tmp_path / "m")
    reason = " (the run started from random weights)"
    assert [line for line in done.stdout.splitlines() if line.startswith("missing")] == [
        f"missing: {', '.join(ALL + IDS)}{reason}"
    ]
    assert "never stop generating" in done.stderr


def test_to_hf_takes_the_tokenizer_of_another_directory(published, tmp_path):
    output = save_checkpoint(tmp_path / "run")
    done = convert("to-hf", output, tmp_path / "m", "--tokenizer", published, "--json")
    assert json.loads(done.stdout)["copied"] == ["tokenizer.json"]
    assert (tmp_path / "m" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "m" / "config.json").read_text())["eos_token_id"] == [1, 2]
    assert done.stderr == ""


def test_to_hf_refuses_bad_words(tmp_path):
    output = save_checkpoint(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    before = listing(tmp_path)
    for words, message in [
        ((tmp_path / "empty", tmp_path / "m"), "empty"),
        ((output, output), "is not empty"),
        ((output, tmp_path / "m", "--tokenizer", tmp_path / "empty"), "no tokenizer files"),
        ((output, tmp_path / "m", "--max-shard-size", "0"), "allow at least 1"),
    ]:
        done = convert("to-hf", *words)
        assert done.exit_code == 2, (message, done.output, done.exception)
        assert message in done.stderr
        assert len(done.stderr.splitlines()) < 24
    assert listing(tmp_path) == before
