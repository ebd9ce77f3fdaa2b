"""Every command of docs/planning.md runs, and the table of degrees agrees with the output."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import call
from tests.tiers import default_of

ROOT = Path(__file__).parents[2]
CASE = "configs/run/gpt_7b_512k_32gpu.yaml"
TEXT = " ".join((ROOT / "docs/planning.md").read_text().split())
COMMANDS = [
    tuple(words.replace("CASE", CASE).split()[1:])
    for words in re.findall(r"`(sppo [^`]*CASE[^`]*)`", TEXT)
]
"""What stands between back ticks, starts with ``sppo`` and names the case."""
DEGREES = re.findall(r"\| (\d+[KM]i) \| [^|]* \| SP (\d+), PP (\d+), N (\d+) \|", TEXT)
"""Tokens, degrees and N of each row of the table of degrees: ours."""


@cache
def report(*words):
    result = call(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(autouse=True)
def _at_the_top(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("words", default_of(COMMANDS, ("solve", CASE, "--explain")), ids=" ".join)
def test_a_command_of_the_text(words):
    assert report(*words)


@pytest.mark.parametrize("row", default_of(DEGREES, DEGREES[0], DEGREES[-1]), ids=" ".join)
def test_a_row_of_the_table_of_degrees(row):
    length, *degrees = row
    best = report("solve", CASE, "parallel.schedule=sppo", f"sequence.length={length}")["best"]
    keys = ("sequence_parallel_degree", "pipeline_parallel_degree", "num_subsequences")
    assert [best[key] for key in keys] == [int(degree) for degree in degrees]
