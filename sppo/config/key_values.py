"""Requests of a command written as ``KEY=VALUE`` words, validated as run files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from sppo.config.base import Section
from sppo.config.loading import apply_overrides
from sppo.config.problems import ConfigError, Problem, problems_of

Request = TypeVar("Request", bound=Section)


def read_keys(
    request: type[Request], words: Sequence[str], *, defaults: Mapping[str, Any] | None = None
) -> Request:
    """Return the request that ``KEY=VALUE`` words write, with values in YAML.

    Args:
        request: Section whose fields are the keys.
        words: Words of the command line.
        defaults: Values of keys that no word gives, instead of those of the section.

    Raises:
        ConfigError: The request has problems; the error lists all.
    """
    problems: list[Problem] = []
    values = apply_overrides(words, dict(defaults or {}), problems)
    try:
        found = request.model_validate(values)
    except ValidationError as error:
        for problem in problems_of(error, keys={"": sorted(request.model_fields)}):
            key = problem.path.partition(".")[0]  # an entry of a list has the key of the list
            problems.append(replace(problem, path=key))
    if problems:
        raise ConfigError("the request", problems)
    return found


def comma_list(value: object) -> list[Any]:
    """Return text such as ``1,2,1`` as the list of its entries, and a single value as a list."""
    if isinstance(value, str):
        return [entry.strip() for entry in value.split(",")]
    return list(value) if isinstance(value, (list, tuple)) else [value]
