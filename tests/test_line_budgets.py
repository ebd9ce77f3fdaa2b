"""Budgets of lines: what a package had when its budget was set, and 5 % more.

A commit that needs more lines raises the budget in pyproject.toml, so growth is decided.
"""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGETS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["sppo"]["lines"]


def packages():
    return sorted(entry.parent.name for entry in (ROOT / "sppo").glob("*/__init__.py"))


def test_every_package_has_a_budget():
    assert sorted(BUDGETS) == sorted([*(f"sppo/{name}" for name in packages()), "tests"])


@pytest.mark.parametrize("folder", BUDGETS)
def test_no_package_is_over_its_budget(folder):
    files = [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
    assert sum(len(path.read_bytes().splitlines()) for path in files) <= BUDGETS[folder]
