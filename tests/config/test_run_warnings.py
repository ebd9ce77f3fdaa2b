"""Warnings about runs that can be trained, and the commands that print them."""

import pytest

import sppo
from sppo.config import load_run
from sppo.config.run_warnings import run_warnings
from tests.conftest import succeed


def warnings(length, **model):
    run = {"model": model, "data": {"tokens": "tokens"}, "sequence": {"length": length}}
    return list(run_warnings(load_run(run)))


def test_positions_beyond_those_of_a_preset():
    assert warnings(40960, preset="qwen3-8b") == []
    (text,) = warnings(81921, preset="qwen3-8b")
    assert "sequence.length 81921 is beyond the 40960 positions of this model" in text
    assert "{type: yarn, factor: 3, original_max_positions: 40960}" in text


def test_positions_that_are_stretched_too_little_or_enough():
    scaling = {"type": "yarn", "factor": 2, "original_max_positions": 40960}
    assert warnings(81920, preset="qwen3-8b", rope_scaling=scaling) == []
    (text,) = warnings(131072, preset="qwen3-8b", rope_scaling=scaling)
    assert "{type: yarn, factor: 4, original_max_positions: 40960}" in text


@pytest.mark.parametrize(
    "command",
    [
        "config check run.yaml",
        "solve run.yaml",
        "estimate run.yaml",
        "simulate run.yaml",
        "eval run.yaml --initial",
    ],
)
def test_every_command_says_them(work, caplog, command):
    succeed(*command.split(), "model.max_positions=32")
    assert "warning: sequence.length 64 is beyond the 32 positions" in caplog.text


def test_every_function_that_plans_says_them(caplog):
    model, data = {"preset": "tiny-test", "max_positions": 32}, {"tokens": "tokens"}
    run = sppo.load_run({"model": model, "data": data, "sequence": {"length": 64}})
    for plan in (sppo.solve, sppo.estimate, sppo.simulate):
        caplog.clear()
        plan(run)
        assert "sequence.length 64 is beyond the 32 positions" in caplog.text
