"""Facts that must be the same on all ranks of a job, and the report of those that differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MOST_LINES = 15


def flat_facts(values: Mapping[str, Any], *, prefix: str = "") -> dict[str, str]:
    """Return nested ``values`` as one fact per leaf, so that differences are reported by key.

    For example ``{"a.b": "1"}`` for ``{"a": {"b": 1}}``.
    """
    facts: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            facts |= flat_facts(value, prefix=f"{name}.")
        else:
            facts[name] = json.dumps(value)
    return facts


def difference_report(facts: Sequence[Mapping[str, str]]) -> str:
    """Return the error message for ranks with different facts; "" if all ranks have equal facts.

    Args:
        facts: Facts of every rank, in order of rank.
    """
    lines = [f"  {line}" for line in _differences(facts)]
    if not lines:
        return ""
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  and {len(lines) - _MOST_LINES} more"]
    return (
        "the ranks of a job must all run the same, and these do not:\n"
        + "\n".join(lines)
        + "\nstart every rank from the same installation with the same command and the same data"
    )


def _differences(facts: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield one line for each value that differs from the value on rank 0."""
    for name in dict.fromkeys(name for values in facts for name in values):
        expected = facts[0].get(name, "nothing")
        others: dict[str, list[str]] = {}
        for rank, values in enumerate(facts):
            value = values.get(name, "nothing")
            if value != expected:
                others.setdefault(value, []).append(str(rank))
        for value, ranks in others.items():
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
            yield f"{name}: {expected} on rank 0, {value} on {who}"
