"""Lengths of the samples of a few steps, from token data and from distributions."""

import pytest

from sppo.data.sample_rows import TrainingData
from sppo.data.samples.length_distributions import DISTRIBUTIONS
from sppo.data.samples.step_lengths import DRAWN_STEPS, drawn_steps, drawn_steps_if_there
from sppo.data.tokens import open_tokens
from tests.conftest import write_tokens
from tests.make import make_run


def run_of(tokens, *, length=32, longer="cut", seed=0, shuffle=True, **train):
    return make_run(
        data={"tokens": str(tokens), "samples": "documents", "shuffle": shuffle},
        sequence={"length": length, "longer": longer},
        train={"seed": seed, **(train or {"samples_per_step": 4})},
    )


@pytest.fixture
def tokens(tmp_path):
    return write_tokens(tmp_path / "tokens", num_tokens=500, documents=(10, 15, 90, 200, 340))


@pytest.mark.parametrize("step", [{"samples_per_step": 4}, {"tokens_per_step": 70}])
def test_steps_are_the_first_that_training_runs(tokens, step):
    run = run_of(tokens, **step)
    data = open_tokens(tokens)
    samples = TrainingData.of(run, data)
    found = drawn_steps(run)
    assert len(found.lengths) == DRAWN_STEPS
    position = 0
    for lengths in found.lengths:
        chosen = samples.step_samples(position)
        assert lengths == samples.lengths(chosen)
        position += len(chosen)
    assert found.source == str(tokens)


def test_files_are_shuffled_also_where_training_does_not(tokens):
    assert drawn_steps(run_of(tokens, shuffle=False)) == drawn_steps(run_of(tokens))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_are_drawn_the_same_every_time(name, tmp_path):
    run = run_of(tmp_path / "none", length=4096, samples_per_step=64)
    found = drawn_steps(run, distribution=name)
    assert found == drawn_steps(run, distribution=name)
    assert [len(lengths) for lengths in found.lengths] == [64] * DRAWN_STEPS
    assert max(map(max, found.lengths)) <= 4096
    assert len(set(found.lengths)) == DRAWN_STEPS
    other = run_of(tmp_path / "none", length=4096, samples_per_step=64, seed=1)
    assert drawn_steps(other, distribution=name) != found


def test_longer_documents_become_what_the_run_says(tmp_path):
    cut = run_of(tmp_path, length=1024, longer="cut", samples_per_step=256)
    drop = run_of(tmp_path, length=1024, longer="drop", samples_per_step=256)
    refuse = run_of(tmp_path, length=1024, longer="refuse", samples_per_step=256)
    assert max(map(max, drawn_steps(cut, distribution="magi").lengths)) == 1024
    assert max(map(max, drawn_steps(drop, distribution="magi").lengths)) <= 1024
    with pytest.raises(ValueError, match="longer than sequence.length 1024"):
        drawn_steps(refuse, distribution="magi")


def test_mistakes_are_told(tmp_path, tokens):
    with pytest.raises(ValueError, match="there are magi, .*Did you mean 'github'"):
        drawn_steps(run_of(tokens), distribution="githib")
    with pytest.raises(ValueError, match="not there.*sppo data prepare.*--lengths magi"):
        drawn_steps(run_of(tmp_path / "none"))
    with pytest.raises(ValueError, match="none of its 6 documents is a sample"):
        drawn_steps(run_of(tokens, length=1, longer="drop"))


def test_a_directory_that_holds_no_token_data_has_no_steps(tmp_path):
    """Such as the default data: estimates need no data, so no command refuses it for them."""
    (tmp_path / "text.txt").write_text("text", encoding="utf-8")
    assert drawn_steps_if_there(run_of(tmp_path)) is None
    assert drawn_steps_if_there(run_of(tmp_path / "missing")) is None
