"""Mistakes that can be found without torch are reported before torch is imported."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

import sppo
from tests.conftest import write_run, write_tokens

# One process for all cases: in it torch cannot be imported.
SCRIPT = """
import json, sys
sys.modules["torch"] = None
from typer.testing import CliRunner
import sppo
from sppo.cli.app import app

told = {}
for words in json.load(sys.stdin):
    if words[0] in ("sppo.train", "sppo.evaluate"):
        try:
            getattr(sppo, words[0][5:])(sppo.load_run("run.yaml", words[1:]))
        except ValueError as error:
            told[" ".join(words)] = [2, "", str(error)]
    else:
        result = CliRunner().invoke(app, words)
        told[" ".join(words)] = [result.exit_code, result.stdout, result.stderr]
print(json.dumps(told))
"""
CASES = {
    "train nofile.yaml": "no such file; beside it:",
    "train run.yaml data.tokens=nowhere": "nowhere: no such directory",
    "train run.yaml train.output=run.yaml": "is a file, not a directory",
    "train run.yaml parallel.pipeline_parallel_degree=9": "every stage needs a layer",
    "train run.yaml parallel.sequence_parallel_degree=3": "query heads cannot be sharded",
    "train run.yaml --plan nowhere.json": "nowhere.json",
    "train run.yaml --plan plan.json": "the plan was made for another run",
    "train run.yaml --plan stale.json": "digest 000000000000, and here",
    'train run.yaml model={"from_hf":"hf"}': "holds neither model.safetensors nor",
    "train run.yaml model.from_hf=models/8b": "nothing is downloaded: hf download",
    "eval run.yaml": "To evaluate random weights of seed 0, which the run starts from",
    "eval run.yaml --checkpoint nowhere": "nowhere holds no checkpoint (no such directory)",
    "eval run.yaml --checkpoint out --initial": "leave one of the two out",
    "eval run.yaml --initial data.eval_tokens=nowhere": "nowhere: no such directory",
    'eval run.yaml model={"from_hf":"hf"} --initial': "holds neither model.safetensors nor",
    "convert to-hf nowhere new": "nowhere holds no checkpoint (no such directory)",
    "convert to-hf nowhere tokens": "tokens is not empty",
    "convert from-hf hf new": "holds neither model.safetensors nor",
    "sppo.train data.tokens=nowhere": "nowhere: no such directory",
    "sppo.evaluate data.tokens=nowhere": "To evaluate random weights",
}
TWO_RANKS = "train run.yaml model.num_layers=2 parallel.pipeline_parallel_degree=2"
RANKS = (TWO_RANKS, f"{TWO_RANKS} -q")
"""Right, so that torch is asked for."""
PLANNED = ("solve run.yaml -o solved.json", "estimate run.yaml", "simulate solved.json")
"""Needs no torch."""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each case ends with: exit code, stdout and stderr."""
    work = tmp_path_factory.mktemp("mistakes")
    write_tokens(work / "tokens")
    write_run(work / "run.yaml")
    write_run(work / "other.yaml", sequence={"length": 128})
    sppo.save_plan(sppo.solve(sppo.load_run(work / "other.yaml")), work / "plan.json")
    plan = sppo.solve(sppo.load_run(work / "run.yaml"))
    sppo.save_plan(replace(plan, program_digest="0" * 64), work / "stale.json")
    (work / "hf").mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    (work / "hf/config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(
            [case.split() for case in [*CASES, TWO_RANKS, f"{TWO_RANKS} -q", *PLANNED]]
        ),
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("case", "says"), CASES.items())
def test_is_told_without_torch(told, case, says):
    code, out, said = told[case]
    assert says in " ".join(said.split())
    assert (code, out) == (2, "")


def test_ranks_are_announced_before_torch_is_imported(told):
    code, out, said = told[TWO_RANKS]
    assert out.startswith("start     2 ranks on this machine (pipeline 2): ")
    assert (code, said, len(out.splitlines())) == (1, "", 1), "it ended where torch was asked for"
    assert told[f"{TWO_RANKS} -q"] == [1, "", ""]


@pytest.mark.parametrize("case", PLANNED)
def test_planning_needs_no_torch(told, case):
    assert told[case][0] == 0, told[case]
