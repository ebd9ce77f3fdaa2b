import json

import pytest

from sppo.config import RunConfig, load_run
from sppo.config.yaml_file import parse_yaml
from tests.conftest import refuse, succeed, tree, write_run

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


def test_show_as_json(run_yaml):
    values = json.loads(succeed("config", "show", run_yaml, "train.steps=9", "--json"))
    assert values == json.loads(load_run(run_yaml, ["train.steps=9"]).model_dump_json())


def test_check_says_so_when_nothing_is_wrong(run_yaml):
    assert succeed("config", "check", run_yaml) == f"{run_yaml}: no problems\n"
    assert json.loads(succeed("config", "check", run_yaml, "--json")) == {
        "valid": True,
        "problems": [],
    }


def test_check_lists_all_that_is_wrong(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(BAD)
    before = tree(tmp_path)
    for command in ("check", "show"):
        error = refuse("config", command, path, "train.steps=0", "nonsense")
        assert f"{path} has 4 problems" in error
        assert "Did you mean 'tiny'?" in error
        assert "Did you mean 'alignment'?" in error
        assert "train.steps" in error
        assert "section.key=value" in error
    assert tree(tmp_path) == before


def test_check_as_json(tmp_path):
    from tests.conftest import call

    path = tmp_path / "run.yaml"
    path.write_text(BAD)
    result = call("config", "check", path, "--json")
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


def test_files_that_are_not_there(tmp_path):
    (tmp_path / "run.yaml").touch()
    for command in ("check", "show"):
        assert "beside it: run.yaml" in refuse("config", command, tmp_path / "rum.yaml")


def test_schema_needs_no_file():
    schema = json.loads(succeed("config", "schema"))
    assert schema == json.loads(succeed("config", "schema", "not-there.yaml"))
    assert schema["required"] == ["model", "data", "sequence"]
    assert "required" not in schema["$defs"]["ModelConfig"]
