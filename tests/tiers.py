"""The tiers of tests: what the default tier leaves to ``scripts/test.sh --all``.

The default tier meets every kind of thing that is tested: every schedule, policy, family of models,
back end, sequence parallelism, ZeRO level and axis of the mesh. Further combinations of them, and
tests that take long for what they show beyond others, are marked ``exhaustive``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

default_tier = True
"""Whether pytest was asked for the default tier, which ``tests/conftest.py`` finds out."""


def examples(few: int, *, all: int) -> int:
    """Examples of a hypothesis test: ``few`` in the default tier, ``all`` with ``--all``."""
    return few if default_tier else all


def exhaustive(*values: Any) -> list[Any]:
    """Mark values of one parameter, whose cases are left to the exhaustive tier."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def default_of(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the values of one parameter, all but ``kept`` left to the exhaustive tier."""
    found = list(values)
    assert all(value in found for value in kept), f"{kept}: not all are among {found}"
    return [value if value in kept else exhaustive(value)[0] for value in found]


def each_once(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of the values of several parameters.

    The default tier meets every value in one of as few cases as there are values of the longest
    axis; all other cases are left to the exhaustive tier.
    """
    lists = [list(axis) for axis in axes]
    lengths = [len(values) for values in lists]
    default = {tuple(i % length for length in lengths) for i in range(max(lengths))}
    return [
        pytest.param(
            *(values[i] for values, i in zip(lists, indices, strict=True)),
            marks=() if indices in default else pytest.mark.exhaustive,
        )
        for indices in itertools.product(*map(range, lengths))
    ]
