"""Section ``validation``: its sets, what is watched, and mistakes in it."""

import pytest

from sppo.config import load_run
from sppo.config.advice import run_warnings
from sppo.config.problems import ConfigError
from tests.make import make_run

SETS = {"held_out": {"tokens": "held"}, "needle": {"tokens": "needle", "length": "1Ki"}}


def test_sets_and_what_is_watched():
    run = make_run(validation={"every": 5, "sets": SETS})
    assert [*run.evaluated_sets] == ["held_out", "needle"]
    assert run.validation.watched("held_out") == ("held_out", "loss")
    run = load_run(
        run, ["validation.sets.needle.samples=documents", "validation.watch=needle.exact"]
    )
    assert run.validation.watched("held_out") == ("needle", "exact")


def test_tokens_of_evaluations_are_a_set():
    run = make_run(data={"eval_tokens": "held"}, validation={"every": 5})
    assert {name: own.tokens for name, own in run.evaluated_sets.items()} == {"held_out": "held"}
    assert make_run(data={"eval_tokens": "held"}).evaluated_sets == {}


def test_sets_that_are_trained_on_are_warned_of():
    run = make_run(validation={"every": 5, "sets": {**SETS, "mine": {"tokens": "data"}}})
    (warning,) = run_warnings(run)
    assert warning.startswith("validation.sets.mine.tokens data is trained on")


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({}, "validation.every"),
        ({"every": 5}, "there is nothing to validate on"),
        ({"every": 0, "sets": SETS}, "validation.every"),
        ({"every": 5, "sets": SETS, "watch": "chat"}, "no such set; sets: held_out, needle"),
        ({"every": 5, "sets": SETS, "watch": "needle.f1"}, "a set has loss, accuracy, exact"),
        ({"every": 5, "sets": SETS, "watch": "needle.exact"}, "exact counts documents"),
        ({"every": 5, "sets": {"a.b": {"tokens": "held"}}}, "validation.sets"),
        ({"every": 5, "sets": {"a": {"token": "held"}}}, "validation.sets.a.token"),
    ],
    ids=str,
)
def test_mistakes(section, told):
    with pytest.raises(ConfigError, match=told):
        make_run(validation=section)


def test_length_beyond_learned_positions():
    model = {"preset": "tiny", "position": "learned", "max_positions": 128}
    with pytest.raises(ConfigError, match="needle: length 1024 is longer than the 128 learned"):
        make_run(model, validation={"every": 5, "sets": SETS})
