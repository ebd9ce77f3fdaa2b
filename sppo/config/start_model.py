"""Model of a run that starts from another run (section ``start``): that of the other run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sppo.config.json_file import JsonError, read_json
from sppo.config.model import ModelConfig
from sppo.config.problems import Problem
from sppo.quoting import quoted

CONFIG_FILE = "run.json"
"""File in the output directory of a run with its configuration."""

CONTEXT_KEYS = ("rope_theta", "rope_scaling", "max_positions")
"""Keys of the model that may differ from those of the other run: they stretch the context, and
leave the shapes of all weights."""


def model_of_start(from_run: str, *, output: object) -> dict[str, Any]:
    """Return the model section of the run in an output directory, with all keys.

    If that run is gone by now, a run that has started from it keeps the model in its own output.

    Args:
        from_run: Output directory of the run that another starts from.
        output: ``train.output`` of the run that starts.

    Raises:
        ValueError: There is no such run, or its configuration cannot be read.
    """
    directory = Path(from_run)
    stored = _stored(directory)
    if stored is None and isinstance(output, str):
        own = _stored(Path(output)) or {}
        before = own.get("start")
        if isinstance(before, dict) and before.get("from_run") == from_run:
            stored = own
    if stored is None:
        raise ValueError(
            f"{directory} holds no {CONFIG_FILE}: give the output directory of a run that was "
            "trained, its train.output"
        )
    try:
        model = ModelConfig.model_validate(stored.get("model"))
    except ValidationError:
        raise ValueError(f"{directory / CONFIG_FILE} is no run's configuration") from None
    return model.model_dump(mode="json")


def _stored(directory: Path) -> dict[str, Any] | None:
    """Return the configuration that a run stored in its output directory; None if there is none."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return None
    try:
        stored = read_json(path)
    except (JsonError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(stored, dict):
        raise ValueError(f"{path} is no run's configuration")
    return stored


def changed_shape(model: ModelConfig, base: Mapping[str, Any], *, run: str) -> Iterator[Problem]:
    """Yield the problem of every key of a model that differs and may not.

    Args:
        model: Model of a run that starts from another.
        base: Model section of that other run, with all keys.
        run: Output directory of that other run, for messages.
    """
    ours = model.model_dump(mode="json")
    learned = model.position == "learned"
    may_differ = CONTEXT_KEYS[: -1 if learned else None]
    for key, value in ours.items():
        if value != base.get(key) and key not in may_differ:
            yield Problem(
                f"model.{key}",
                quoted(value),
                f"{quoted(base.get(key))} in {run}, from which this run starts; only "
                f"{', '.join(may_differ)} may differ: leave model.{key} out",
            )
