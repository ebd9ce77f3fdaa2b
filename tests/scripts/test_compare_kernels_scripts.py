"""Scripts that compare kernels with plain torch: they run and print their results."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script in this process, and gives what it prints."""

    def run_script(name, *arguments):
        words = [str(SCRIPTS / name), *arguments, "--threads", "1", "--turns", "1"]
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.syspath_prepend(SCRIPTS)
        runpy.run_path(words[0], run_name="__main__")
        return capsys.readouterr().out

    threads = torch.get_num_threads()
    yield run_script
    torch.set_num_threads(threads)


def test_attention_beside_one_unsplit_call(run, tmp_path):
    output = tmp_path / "attention.json"
    options = "--length 300 --tokens 100,64 --heads 4/2 --head-size 16 --dtypes fp32"
    said = run("compare_attention.py", *options.split(), "--output", str(output))
    assert "300 tokens, 4 heads of 16 on 2, fp32" in said
    found = json.loads(output.read_text())["comparisons"]
    assert [times["tokens"] for times in found] == [100, 64]
    assert all(times["both_ratio"] > 0 for times in found)


CROSS_ENTROPY = ("--tokens=200", "--vocabulary=500", "--hidden=16", "--output=losses.json")


def test_cross_entropy_beside_two_steps(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "tiled takes" in run("compare_cross_entropy.py", *CROSS_ENTROPY)
    (both,) = json.loads((tmp_path / "losses.json").read_text())
    losses = [side["loss"] for side in both["sides"].values()]
    assert abs(losses[0] - losses[1]) < 1e-2 * losses[1]


def test_one_side_joins_the_report_of_another_time(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.json").write_text('[{"sides": {}}]')
    run("compare_cross_entropy.py", *CROSS_ENTROPY, "--sides", "tiled")
    _, tiled = json.loads((tmp_path / "losses.json").read_text())
    assert set(tiled["sides"]) == {"tiled"}


def test_fused_projections_beside_separate_ones(run, tmp_path):
    output = tmp_path / "fused.json"
    options = f"--hidden 1024 --tokens 16 --dtypes fp32 --output {output}"
    said = run("compare_fused_projections.py", *options.split())
    assert "q/k/v fp32 E=1024 C=16 forward" in said
    rows = json.loads(output.read_text())["rows"]
    passes = ["forward", "input gradient", "weight gradients"]
    assert [row["pass"] for row in rows] == passes * 2
    for row in rows:
        ratio = row["one_storage_s"] / row["separate_s"]  # of the only turn
        assert row["one_storage_ratio"] == pytest.approx(ratio)


def test_fused_projections_are_the_separate_ones(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    names = runpy.run_path(str(SCRIPTS / "compare_fused_projections.py"))
    case = {"dtype": "fp32", "hidden": 32, "tokens": 5}
    passes = names["_passes"](case, (16, 8, 8), "cpu")
    for way, call in passes["forward"].items():
        parts = zip(call(), passes["forward"]["separate"](), strict=True)
        assert all(torch.allclose(ours, apart, atol=1e-6) for ours, apart in parts), way
    expected = passes["input gradient"]["separate"]()
    for way, call in passes["input gradient"].items():
        torch.testing.assert_close(call(), expected, rtol=1e-5, atol=1e-6, msg=way)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("attention", "--heads 8/3", "--heads: 8 query heads cannot share 3 key-value heads"),
        ("attention", "--dtypes fp32,fp16", "--dtypes: 'fp16' is not one of bf16, fp32"),
        ("attention", "--turns 0", "--turns: 0 is too small; write a number from 1 on"),
        ("attention", "--length 1Ki", "--tokens 4096: more than the sequence's --length 1024"),
        ("cross_entropy", "--tokens 0", "--tokens: 0 is too small; write a number from 1 on"),
        ("cross_entropy", "--sides plan", "--sides: 'plan' is not one of tiled, plain"),
    ],
)
def test_bad_options_are_refused(monkeypatch, capsys, name, words, message):
    script = SCRIPTS / f"compare_{name}.py"
    monkeypatch.setattr(sys, "argv", [str(script), *words.split()])
    monkeypatch.syspath_prepend(SCRIPTS)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
