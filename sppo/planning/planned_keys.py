"""Keys of a run file that a plan rests on, and the check that a run still has their values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sppo.config.run import RunConfig
from sppo.planning.plan import ExecutionPlan
from sppo.quoting import one_line

_PLANNED_KEYS: dict[str, Any] = {
    "model": True,
    "data": {"samples", "isolate_documents"},
    "sequence": True,
    "parallel": True,
    "activations": True,
    "state": True,
    "train": {"sequences_per_step", "samples_per_step", "tokens_per_step", "dtype"},
}
"""Keys of a run file that a plan holds, by section; True means all keys of the section."""
_EXCEPT: dict[str, Any] = {"parallel": {"timeout_s"}, "activations": {"debug"}}
"""Keys of these sections that no plan rests on."""
_NOT_OF_THE_SHAPE = (
    "preset",
    "from_hf",
    "family",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
    "init_std",
)
"""Keys of the model that change neither time nor memory: its name, and values of its arithmetic."""


def planned_part(run: RunConfig) -> dict[str, Any]:
    """Return the keys of `run` that a plan holds, by section, as plain JSON values."""
    return run.model_dump(mode="json", include=_PLANNED_KEYS, exclude=_EXCEPT)


def check_plan_fits(plan: ExecutionPlan, run: RunConfig) -> None:
    """Raise ValueError if `plan` was made for another run.

    Models are compared by shape, so a plan for a preset also fits weights of the same shape.

    Raises:
        ValueError: The plan does not match; the message names every differing key with both values.
    """
    planned, now = plan.run, planned_part(run)
    differences = list(_differences(_with_shape_alone(planned), _with_shape_alone(now)))
    if differences:
        raise ValueError(
            f"the plan was made for another run: {'; '.join(differences)}. Make it again with "
            "sppo solve, or undo the change"
        )


def _with_shape_alone(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `keys` without those of the model that no plan rests on."""
    model = {key: value for key, value in keys["model"].items() if key not in _NOT_OF_THE_SHAPE}
    if model.get("position") != "learned":  # no table of positions
        model.pop("max_positions", None)
    return {**keys, "model": model}


def _differences(
    planned: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    for key in sorted({*planned, *now}):
        before, after = planned.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            was, now_is = one_line(json.dumps(before)), one_line(json.dumps(after))
            yield f"{prefix}{key} was {was}, is {now_is}"
