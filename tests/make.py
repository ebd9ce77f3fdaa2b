"""Builder of run configurations for tests of everything that takes one."""

from __future__ import annotations

from typing import Any

from sppo.config.loading import check_run
from sppo.config.run import RunConfig


def make_run(
    model: str | dict[str, Any] = "tiny", *, length: int | str = 64, **sections: Any
) -> RunConfig:
    """Make a run of a preset, or of a model's own keys.

    Args:
        model: name of the preset, or keys of the section ``model``.
        length: ``sequence.length``.
        sections: further sections; keys of ``data`` and ``sequence`` are added to these.
    """
    raw = {
        "model": {"preset": model} if isinstance(model, str) else model,
        **sections,
        "data": {"tokens": "data", **sections.get("data", {})},
        "sequence": {"length": length, **sections.get("sequence", {})},
    }
    return check_run(raw, source="test")
