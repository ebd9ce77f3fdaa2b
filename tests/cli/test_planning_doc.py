"""Every command of docs/planning.md runs, and the table of degrees agrees with the output."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import call

ROOT = Path(__file__).parents[2]
CASE = "configs/run/gpt_7b_512k_32gpu.yaml"
TEXT = " ".join((ROOT / "docs/planning.md").read_text().split())


def commands():
    """What stands between back ticks, starts with ``sppo`` and names the case."""
    found = re.findall(r"`(sppo [^`]*CASE[^`]*)`", TEXT)
    return [tuple(words.replace("CASE", CASE).split()[1:]) for words in found]


@cache
def report(*words):
    result = call(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(autouse=True)
def _at_the_top(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_there_are_commands():
    assert len(commands()) >= 6


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[2:]) or words[0])
def test_a_command_of_the_text(words):
    assert report(*words)


def rows():
    """Tokens, degrees and N of the table of degrees: ours."""
    found = re.findall(r"\| (\d+[KM]i) \| [^|]* \| SP (\d+), PP (\d+), N (\d+) \|", TEXT)
    return [(length, *map(int, numbers)) for length, *numbers in found]


def test_the_table_of_degrees_is_there():
    assert [row[0] for row in rows()] == ["512Ki", "640Ki", "768Ki", "896Ki", "1Mi"]


@pytest.mark.parametrize(("length", "sequence", "pipeline", "pieces"), rows())
def test_a_row_of_the_table_of_degrees(length, sequence, pipeline, pieces):
    best = report("solve", CASE, "parallel.schedule=sppo", f"sequence.length={length}")["best"]
    assert best["sequence_parallel_degree"] == sequence
    assert best["pipeline_parallel_degree"] == pipeline
    assert best["num_subsequences"] == pieces
