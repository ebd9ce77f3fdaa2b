"""Lengths that a run takes from its data: ``train.epochs``, ``sequence.length: longest``."""

import pytest

from sppo.config import load_run
from sppo.training.trained_run import trained_run
from tests.conftest import LENGTH, refuse, succeed, tree, write_run, write_tokens

STARTS = (9, 30, 31, 100, 150, 400)


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """Function that writes a run of documents without a number of steps."""
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "tokens", num_tokens=8 * LENGTH, documents=STARTS)

    def write(epochs=None, **train):
        train = {"samples_per_step": 4, **train}
        path = write_run(tmp_path / "run.yaml", data={"samples": "documents"}, train=train)
        if epochs is not None:
            text = path.read_text().replace("steps: 4", f"epochs: {epochs}")
            path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("epochs", "train", "steps"),
    [
        (2, {}, 6),  # 11 samples of at most 64 tokens
        (1, {"samples_per_step": None, "tokens_per_step": 3 * LENGTH}, 3),
        (0.01, {}, 1),
    ],
)
def test_epochs_become_steps(run_of, epochs, train, steps):
    path = run_of(epochs, **train)
    assert "epochs: " in succeed("config", "show", path)
    assert "\n  steps:" not in succeed("config", "show", path)
    succeed("config", "check", path)
    text = succeed("train", path, "planning.ahead=false")
    assert f"epochs    {epochs} of tokens: {steps} steps" in text
    assert f"step {steps}/{steps} | " in text
    assert trained_run(load_run(path)).steps == steps
    assert f"all {steps} steps were done before" in succeed("train", path)


def test_more_epochs_go_on(run_of):
    succeed("train", run_of(0.5))
    assert "or train.epochs if the run file has it, to go on" in succeed("train", "run.yaml")
    text = succeed("train", "run.yaml", "train.epochs=1")
    assert "step 1/" not in text
    assert "step 3/3 | " in text


def test_epochs_are_refused_before_anything_is_made(run_of, tmp_path):
    before = tree(tmp_path / "tokens")
    both = run_of(1)
    both.write_text(both.read_text().replace("epochs: 1", "epochs: 1\n  steps: 4"))
    assert "write train.epochs=null" in refuse("train", both)
    wsd = ("optimizer.schedule=wsd", "optimizer.decay_steps=9")
    error = refuse("train", run_of(1), *wsd)
    assert "train.epochs 1 are 3 steps: optimizer.decay_steps=9: 9 steps after 0 " in error
    assert "train.epochs 1 are 3 steps" in refuse("config", "check", "run.yaml", *wsd)
    succeed("config", "check", "run.yaml", "optimizer.schedule=wsd", "optimizer.decay_steps=20%")
    mixture = "data={samples: documents, sources: {a: {tokens: tokens, weight: 1}}}"
    assert "every source of data.sources has epochs of its own" in refuse(
        "train", "run.yaml", mixture
    )
    assert tree(tmp_path / "tokens") == before
    assert not (tmp_path / "out").exists()


def test_the_longest_document_is_the_length(run_of, tmp_path):
    path = run_of()
    longest = 400 - 150 - 1
    assert f"length: {longest}\n" in succeed("config", "show", path, "sequence.length=longest")
    text = succeed("train", path, "sequence.length=longest", "sequence.longer=refuse")
    assert f"7 samples of 8 to {longest} tokens" not in text
    assert f" to {longest} tokens an epoch" in text
    write_tokens(tmp_path / "long", num_tokens=500)
    sources = "{a: {tokens: tokens, weight: 1}, b: {tokens: long, weight: 1}}"
    words = ("sequence.length=longest", "data.tokens=null", f"data.sources={sources}")
    assert "length: 499\n" in succeed("config", "show", path, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.samples=stream", "train.samples_per_step=null"], "has no longest document; write"),
        (["data.tokens=nowhere"], "of which document? nowhere/documents.npy: no such file"),
        (["data.tokens=null"], "of which data? data names none"),
        (["data.tokens=damaged"], "of which document? damaged/documents.npy: not a .npy array"),
    ],
)
def test_no_longest_document(run_of, tmp_path, words, message):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/documents.npy").write_text("text")
    error = refuse("train", run_of(), "sequence.length=longest", *words)
    assert message in error
    assert "sequence.length " in error
