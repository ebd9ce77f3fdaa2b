"""Damaged input ends in success or in a documented error.

For more and other cases: ``bash scripts/test.sh --all tests/fuzzing --hypothesis-seed=1``.
"""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.fuzzing.targets import TARGETS
from tests.tiers import examples

SLOW = ("options", "run_files")
MOST_GROWTH_BYTES = 600 << 20
MOST_LINES, MOST_CHARACTERS = 40, 2500
"""Of a message, and of each of its lines."""


def undocumented(error: Exception) -> str | None:
    """Return what is wrong with an error; None if it is documented.

    Documented is a ValueError of the project's own words, an OSError that names its file, and a
    MemoryError with a message; a few lines without control characters.
    """
    foreign = (UnicodeError, json.JSONDecodeError, ValidationError)
    if isinstance(error, foreign) or not isinstance(error, (ValueError, OSError, MemoryError)):
        return "no documented error"
    lines = str(error).split("\n")
    if not str(error).strip():
        return "without a message"
    if len(lines) > MOST_LINES or max(map(len, lines)) > MOST_CHARACTERS:
        return f"a message of {len(str(error))} characters"
    if not all(line.isprintable() for line in lines):
        return f"control characters: {str(error)[:300]!r}"
    return None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
def test_damaged_input_is_refused_as_documented(target: str, tmp_path: Path) -> None:
    count = examples(20, all=200) if target in SLOW else examples(60, all=1000)

    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def read_damaged_input(data: st.DataObject) -> None:
        try:
            TARGETS[target](data.draw, tmp_path)
        except Exception as error:
            problem = undocumented(error)
            if problem is not None:
                raise AssertionError(f"{type(error).__name__}: {problem}") from error

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    read_damaged_input()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    assert grown < MOST_GROWTH_BYTES
