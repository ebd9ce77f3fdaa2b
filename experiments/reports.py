"""Reports in docs/results, and tables in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from experiments import harness

RESULTS = harness.ROOT / "docs/results"


@cache
def report(name: str) -> dict[str, Any]:
    """Return the report ``docs/results/NAME.json``."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def markdown(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    names = list(headings)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
