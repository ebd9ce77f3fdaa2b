"""``sppo eval``: the table, the JSON, the plot, and refused requests."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from sppo.engine.engine import ForwardResult
from sppo.engine.label_losses import LabelLosses
from sppo.engine.trace import Stopwatch, Trace
from tests.conftest import LENGTH, refuse, succeed, tree, write_run, write_tokens


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that is done, with held-out tokens beside it."""
    directory = tmp_path_factory.mktemp("finished")
    write_tokens(directory / "tokens")
    write_tokens(directory / "held", num_tokens=3 * 4 * LENGTH + 1, seed=1)
    keys = {"length": 4 * LENGTH, "num_subsequences": 4, "alignment": 8}
    write_run(directory / "run.yaml", sequence=keys, data={"eval_tokens": "held"})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        succeed("train", "run.yaml")
    return directory


@pytest.fixture
def trained(finished, tmp_path, monkeypatch):
    """A copy of it, as the working directory."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_table(trained):
    before = tree(trained)
    text = succeed("eval", "run.yaml")
    lines = [line.split() for line in text.splitlines()]
    rows = [line for line in lines if line[1:2] == ["to"]]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        ("0", "63", "192"),
        ("64", "127", "192"),
        ("128", "255", "384"),
    ]
    assert "over 768 held-out tokens in 3 sequences of held, weights of step 4 from " in text
    assert "out/checkpoints/step_000004" in text
    assert tree(trained) == before


def test_json(trained):
    result = json.loads(succeed("eval", "run.yaml", "--json"))
    assert result["held_out"] is True
    assert (result["step"], result["num_sequences"], result["num_tokens"]) == (4, 3, 768)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    bins = result["by_position"]
    assert [(row["start"], row["end"]) for row in bins] == [(0, 64), (64, 128), (128, 256)]
    weighted = sum(row["loss"] * row["num_tokens"] for row in bins)
    assert weighted / 768 == pytest.approx(result["loss"])


def test_training_tokens_are_called_so(trained):
    text = succeed("eval", "run.yaml", "data.eval_tokens=null")
    assert "training tokens (no data.eval_tokens given)" in text
    assert "held-out" not in text
    assert " in 1 sequence of held, " in succeed("eval", "run.yaml", "--sequences", "1")


def test_a_particular_checkpoint(trained):
    succeed("train", "run.yaml", "train.steps=6")
    early = ("--checkpoint", "out/checkpoints/step_000004", "--json")
    assert json.loads(succeed("eval", "run.yaml", *early))["step"] == 4
    assert json.loads(succeed("eval", "run.yaml", "--json"))["step"] == 6


def test_the_weights_that_a_run_starts_from_on_request(trained):
    words = ("eval", "run.yaml", "train.output=later", "--initial", "--json")
    result = json.loads(succeed(*words))
    assert (result["step"], result["weights_from"]) == (0, "random weights of seed 0")
    assert result["loss"] == pytest.approx(math.log(32), abs=0.05)
    assert not (trained / "later").exists()
    assert succeed(*words[:-1]).endswith("of held, by random weights of seed 0\n")
    # also of a run that has learnt since
    assert json.loads(succeed("eval", "run.yaml", "--initial", "--json")) == result


def test_published_weights_before_any_training_on_request(trained):
    succeed("convert", "to-hf", "out", "exported")
    words = ("run.yaml", "model={from_hf: exported}", "train.output=later")
    said = refuse("eval", *words)
    assert "To evaluate exported, which the run starts from, write --initial" in said
    result = json.loads(succeed("eval", *words, "--initial", "--json"))
    assert (result["step"], result["weights_from"]) == (0, "exported")
    trained_loss = json.loads(succeed("eval", "run.yaml", "--json"))["loss"]
    assert result["loss"] == pytest.approx(trained_loss, rel=1e-4)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("uot", "train.output: uot holds no checkpoint (no such directory): "),
        ("no/where/at/all", "random weights of seed 0, which the run starts from, write --initial"),
    ],
)
def test_weights_that_nothing_has_trained_are_never_taken_unasked(trained, output, says):
    before = tree(trained)
    said = refuse("eval", "run.yaml", f"train.output={output}")
    assert says in said
    assert len(said.splitlines()) == 1
    assert tree(trained) == before


def test_the_plot(trained):
    told = succeed("eval", "run.yaml", "--png", "by_position.png")
    assert told.endswith("written by_position.png\n")
    assert (trained / "by_position.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.mlp_size=128"], "model.mlp_size is 64 there, 128 in the run file"),
        (["parallel.pipeline_parallel_degree=3"], "every stage needs a layer, and the model has 1"),
        (["--png", "no/such/place.png"], "there is no directory no/such"),
    ],
)
def test_bad_input(trained, words, says):
    before = tree(trained)
    assert says in refuse("eval", "run.yaml", *words)
    assert tree(trained) == before


def test_damaged_weights_are_refused_or_passed_over(trained):
    succeed("train", "run.yaml", "train.steps=5")
    newest = trained / "out/checkpoints/step_000005"
    (newest / "metadata.json").write_text("{}")
    assert json.loads(succeed("eval", "run.yaml", "--json"))["step"] == 4
    assert "is damaged: metadata.json" in refuse("eval", "run.yaml", "--checkpoint", newest)


def test_losses_that_are_no_numbers_are_null_in_json(trained, monkeypatch):
    positions = torch.arange(4 * LENGTH)
    losses = LabelLosses(positions, torch.full(positions.shape, torch.nan), positions < 0)
    monkeypatch.setattr(
        "sppo.engine.engine.Engine.evaluate_together",
        lambda engine, *sequences, **hooks: ForwardResult((losses,), Trace(Stopwatch())),
    )
    result = json.loads(succeed("eval", "run.yaml", "--json"), parse_constant=pytest.fail)
    assert result["loss"] is None
    assert result["perplexity"] is None
    assert result["by_position"][0]["loss"] is None
    succeed("eval", "run.yaml", "--png", "nan.png")


def test_progress_is_ten_lines_at_most(work: Path):
    text = succeed("eval", "run.yaml", "--initial")
    assert "sequence 20 of 20" in text
    assert text.count(" of 20") == 10


def test_training_tokens_that_are_gone_in_part_are_not_needed(trained):
    (trained / "tokens/documents.npy").write_bytes(b"")
    assert " held-out tokens " in succeed("eval", "run.yaml")
