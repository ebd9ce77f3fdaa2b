"""What a run file may say that this version cannot train yet.

Such a file is right, and can be simulated and planned for; only training and evaluation refuse it.
Each later part removes its lines here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sppo.config.problems import Problem, show_value

_TRAINABLE: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("parallel", "multiplexed", ("auto", "off"), "pieces of units are simulated, not trained"),
)
"""(section, key, values that train, why others do not)."""


def check_trainable(sections: Mapping[str, Any]) -> Iterator[Problem]:
    """What training cannot do yet among the parsed ``sections``, by section name."""
    for section, key, allowed, why in _TRAINABLE:
        if section not in sections:
            continue
        value = getattr(sections[section], key)
        if value not in allowed:
            *others, last = (_spelled(choice) for choice in allowed)
            words = f"{', '.join(others)} or {last}" if others else last
            rule = f"not in this version ({why}); write {words}"
            yield Problem(f"{section}.{key}", show_value(value), rule)


def _spelled(value: object) -> str:
    """As YAML spells it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
