import json
import sys

import pytest

from sppo.config import RunConfig, load_run
from sppo.config.yaml_file import parse_yaml
from tests.conftest import call, refuse, succeed, tree, write_run, write_tokens

BAD = "model: {preset: tinny}\ndata: {tokens: t}\nsequence: {length: 5, alignmnt: 3}\n"


@pytest.fixture
def run_yaml(tmp_path):
    return write_run(tmp_path / "run.yaml", activations={"host_memory": "2GiB"})


def test_show_is_a_complete_run_file_that_reads_back_as_itself(run_yaml, tmp_path):
    shown = tmp_path / "shown.yaml"
    shown.write_text(succeed("config", "show", run_yaml, "optimizer.eps=1e-9"))
    assert load_run(shown) == load_run(run_yaml, ["optimizer.eps=1e-9"])
    values = parse_yaml(shown.read_text(), source="shown")
    assert values.keys() == RunConfig.model_fields.keys()
    assert values["model"]["head_size"] == 8
    assert values["activations"]["host_memory"] == 2 << 30


def test_show_leaves_out_the_keys_of_other_kinds_of_stretching(run_yaml):
    scaling = "{type: yarn, factor: 2, original_max_positions: 32}"
    shown = succeed("config", "show", run_yaml, f"model.rope_scaling={scaling}", "--json")
    assert json.loads(shown)["model"]["rope_scaling"] == {
        "type": "yarn",
        "factor": 2.0,
        "original_max_positions": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": None,
        "truncate": True,
    }


def test_check_says_so_when_nothing_is_wrong(run_yaml, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "tokens")
    assert succeed("config", "check", run_yaml) == f"{run_yaml}: no problems\n"
    assert json.loads(succeed("config", "check", run_yaml, "--json")) == {
        "valid": True,
        "problems": [],
        "hints": [],
    }


def test_check_lists_all_that_is_wrong(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(BAD)
    before = tree(tmp_path)
    for command in ("check", "show"):
        error = refuse("config", command, path, "train.steps=0", "nonsense")
        assert "run.yaml has 4 problems" in error
        assert "Did you mean 'tiny'?" in error
        assert "Did you mean 'alignment'?" in error
        assert "train.steps" in error
        assert "section.key=value" in error
    result = call("config", "check", path, "--json")
    assert tree(tmp_path) == before
    assert result.exit_code == 2
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["valid"] is False
    assert [problem["path"] for problem in report["problems"]] == [
        "model.preset",
        "sequence.alignmnt",
    ]
    assert report["problems"][1] == {
        "path": "sequence.alignmnt",
        "value": "3",
        "rule": "unknown key. Did you mean 'alignment'?",
    }


WRONG = {
    "hardware.preset=h101": ("hardware", "'h101'", "Did you mean 'h100'?"),
    "data.eval_tokens=held": ("data.eval_tokens", "'held'", "held: no such directory"),
    "activations.disk=gone": ("activations.disk", "'gone'", "gone: no such directory"),
    "train.output=tokens": ("train.output", "'tokens'", "holds files but no run.json"),
    "sequence.length=1Mi": ("data.tokens", "'tokens'", "needs 1048577"),
    "parallel.data_parallel_degree=3": ("parallel.data_parallel_degree", "3", "make it a multiple"),
    "activations.policy=offload_all": ("activations", "'offload_all'", "has no tier to offload"),
}


@pytest.mark.parametrize("word", WRONG)
def test_check_looks_at_what_the_file_names_as_train_does(work, word):
    path, value, says = WRONG[word]
    before = tree(work)
    result = call("config", "check", "run.yaml", word, "--json")
    (problem,) = json.loads(result.stdout)["problems"]
    assert (problem["path"], problem["value"]) == (path, value)
    assert says in problem["rule"]
    assert tree(work) == before


def test_check_lists_what_the_file_names_all_at_once(work, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    words = (
        "hardware.preset=h101",
        "data={tokens: nowhere, eval_tokens: held}",
        "parallel={pipeline_parallel_degree: 2, data_parallel_degree: 3}",
        "train.tensorboard=true",
    )
    error = refuse("config", "check", "run.yaml", *words)
    assert "run.yaml has 6 problems" in error
    for says in ("h101", "nowhere", "held", "every stage", "multiple", "pip install 'sppo[track]'"):
        assert says in error
    told = refuse("train", "run.yaml", *words[1:])  # without hardware it is the device that asks
    for says in ("nowhere", "held", "every stage", "multiple", "pip install 'sppo[track]'"):
        assert says in told


def test_check_keeps_what_has_several_lines_on_one(work):
    succeed("train", "run.yaml", "train.steps=1")
    error = refuse("config", "check", "run.yaml", "optimizer.lr=0.5", "train.seed=3")
    assert len(error.splitlines()) == 2
    assert "configuration: optimizer.lr: 0.01 there, 0.5 here; train.seed: 0 there" in error
    told = refuse("train", "run.yaml", "optimizer.lr=0.5", "train.seed=3")
    assert "configuration:\n  optimizer.lr: 0.01 there, 0.5 here\n  train.seed" in told


def test_files_that_are_not_there(tmp_path):
    (tmp_path / "run.yaml").touch()
    for command in ("check", "show"):
        assert "beside it: run.yaml" in refuse("config", command, tmp_path / "rum.yaml")


def test_schema_needs_no_file():
    schema = json.loads(succeed("config", "schema"))
    assert schema["required"] == ["model", "data", "sequence"]
    assert "required" not in schema["$defs"]["ModelConfig"]


def test_every_key_of_the_schema_is_described():
    schema = json.loads(succeed("config", "schema"))
    sections = {"": schema, **schema["$defs"]}
    unsaid = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, about in section["properties"].items()
        if len(about.get("description", "")) < 10
    ]
    assert not unsaid
