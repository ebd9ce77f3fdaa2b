"""Answers of the code are the golden ones; ``python -m tests.goldens.make`` makes those anew.

A refactor leaves them as they are. A change that moves one says why in its commit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.goldens.make import ANSWERS, read
from tests.goldens.runs import requests
from tests.tiers import examples

STEP_TOLERANCE = 0.01
"""Of a predicted step, as a share of it: the search may find another plan that is as fast."""
SIMULATION_TOLERANCE = 1e-9
LOSS_TOLERANCES = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 1e-2}
"""Of losses and norms, as a share of them: the order of sums differs from CPU to CPU."""


def differences(golden: Any, found: Any, *, tolerance: float, at: str = "") -> Iterator[str]:
    """Yield what differs: the field, its golden value and the one found.

    Args:
        golden: Values of JSON.
        found: The same of the code under test.
        tolerance: Of floats, as a share of the golden value; everything else must be equal.
        at: Name of the field.
    """
    if isinstance(golden, dict) and isinstance(found, dict):
        for name in {**golden, **found}:
            old, new = golden.get(name), found.get(name)
            yield from differences(old, new, tolerance=tolerance, at=f"{at}.{name}".strip("."))
    elif isinstance(golden, list) and isinstance(found, list) and len(golden) == len(found):
        for index, (old, new) in enumerate(zip(golden, found, strict=True)):
            yield from differences(old, new, tolerance=tolerance, at=f"{at}[{index}]")
    elif isinstance(golden, float) and isinstance(found, float):
        if not math.isclose(golden, found, rel_tol=tolerance, abs_tol=1e-12):
            yield f"{at}: was {golden!r}, is {found!r}"
    elif golden != found:
        yield f"{at}: was {golden!r}, is {found!r}"


def check(kind: str, cases: Iterable[str], *, tolerance: float) -> None:
    """Fail with everything that differs in the answers to some cases of a kind."""
    golden = read(kind)
    moved = [
        f"{kind}, {case}: {difference}"
        for case in cases
        for difference in differences(golden[case], ANSWERS[kind](case), tolerance=tolerance)
    ]
    remake = f"If that is meant: python -m tests.goldens.make {kind}, and say why in the commit."
    assert not moved, "\n".join([*moved, remake])


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=pytest.mark.exhaustive if is_slow else ())
        for words, is_slow in requests().items()
    ],
)
def test_solutions(words):
    check("solutions", [words], tolerance=STEP_TOLERANCE)


def test_predicted_memory():
    check("memory", list(read("memory"))[: examples(50, all=100)], tolerance=0.0)


def test_programs_and_their_simulated_times():
    cases = list(read("programs"))[: examples(100, all=200)]
    check("programs", cases, tolerance=SIMULATION_TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "most"), [("short_losses", examples(10, all=100)), ("trained_losses", 6)]
)
def test_losses(kind, most):
    golden = read(kind)
    for dtype, tolerance in LOSS_TOLERANCES.items():
        cases = [case for case in list(golden)[:most] if golden[case]["dtype"] == dtype]
        check(kind, cases, tolerance=tolerance)
