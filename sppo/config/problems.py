"""What is wrong with a configuration, in the words of the person who wrote it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: where, what was written, which rule it breaks, what to write instead."""

    path: str
    value: str
    rule: str

    def line(self) -> str:
        """``path  value  rule`` on one line."""
        return f"  {self.path:<32} {self.value:<16} {self.rule}".rstrip()


class ConfigError(ValueError):
    """A configuration with one or more problems; its text lists all of them."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{source} has {count} problem{'' if count == 1 else 's'}"
        super().__init__("\n".join([head, *(problem.line() for problem in self.problems)]))


def show_value(value: object) -> str:
    """A value short enough for one line of a report."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def nearest(word: object, choices: Iterable[object]) -> str:
    """``" Did you mean 'flops'?"`` or an empty string when nothing is close."""
    close = difflib.get_close_matches(str(word), [str(c) for c in choices], n=1, cutoff=0.55)
    return f" Did you mean '{close[0]}'?" if close else ""


def unknown_key(path: str, key: str, value: object, known: Iterable[str]) -> Problem:
    """The problem of a key that no section has."""
    known = sorted(known)
    hint = nearest(key, known)
    rule = "unknown key." + (hint or f" Known keys: {', '.join(known)}")
    return Problem(path, show_value(value), rule)


def problems_of(error: ValidationError, section: str, annotations: dict[str, Any]) -> list[Problem]:
    """One :class:`Problem` per fault pydantic found in ``section``."""
    merged: dict[str, Problem] = {}
    for detail in error.errors():
        problem = _problem(detail, section, annotations)
        merged.setdefault(problem.path, problem)
    return list(merged.values())


def _problem(detail: ErrorDetails, section: str, annotations: dict[str, Any]) -> Problem:
    names = [str(part) for part in detail["loc"] if not _is_union_branch(part)]
    path = ".".join([section, *names]) if section else ".".join(names)
    value = detail.get("input")
    kind = detail["type"]
    if kind == "missing":
        return Problem(path, "(missing)", "required")
    if kind == "extra_forbidden":
        return unknown_key(path, names[-1], value, annotations)
    if kind == "literal_error" or names and _literals(annotations.get(names[0])):
        choices = _literals(annotations.get(names[0])) if names else []
        if choices:
            text = ", ".join(str(choice) for choice in choices)
            rest = "" if kind == "literal_error" and not _numeric(detail) else " or a number"
            return Problem(
                path, show_value(value), f"not one of {text}{rest}.{nearest(value, choices)}"
            )
    message = detail["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(value, dict) else show_value(value)
    return Problem(path, shown, message)


def _numeric(detail: ErrorDetails) -> bool:
    return any(_is_union_branch(part) for part in detail["loc"])


def _is_union_branch(part: object) -> bool:
    """Pydantic names the branch of a union it tried; a person did not write that."""
    return isinstance(part, str) and (
        part.startswith(("literal[", "constrained-", "function-")) or part in ("int", "float")
    )


def _literals(annotation: object) -> list[object]:
    """Literal choices of an annotation, unions included."""
    found: list[object] = []
    for argument in get_args(annotation):
        if isinstance(argument, (str, int)) and not isinstance(argument, bool):
            found.append(argument)
        else:
            found.extend(_literals(argument))
    return [choice for choice in found if isinstance(choice, str)]
