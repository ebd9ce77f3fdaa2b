"""Warnings about runs that can be trained, and the commands that print them."""

import pytest

from sppo.config import load_run
from sppo.config.advice import run_warnings
from tests.conftest import succeed


def warnings(length, **model):
    run = {"model": model, "data": {"tokens": "tokens"}, "sequence": {"length": length}}
    return list(run_warnings(load_run(run)))


YARN = {"type": "yarn", "factor": 2, "original_max_positions": 40960}


@pytest.mark.parametrize(
    ("length", "model", "advice"),
    [
        (40960, {}, None),
        (81921, {}, "{type: yarn, factor: 3, original_max_positions: 40960}"),
        (81920, {"rope_scaling": YARN}, None),
        (
            131072,
            {"rope_scaling": YARN},
            "{type: yarn, factor: 4, original_max_positions: 40960}",
        ),
    ],
)
def test_positions_beyond_those_of_a_preset(length, model, advice):
    found = warnings(length, preset="qwen3-8b", **model)
    assert [advice] == [text.partition("model.rope_scaling=")[2] for text in found] or not advice
    assert bool(found) is bool(advice)
    assert all(text.startswith(f"sequence.length {length} is beyond the ") for text in found)


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
