"""Problems of a run configuration, worded by the keys and values that the user wrote."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sppo.config.base import TORCH_DTYPES, ComputeDtype
from sppo.quoting import QUOTE_CHARACTERS, one_line, quoted
from sppo.units import counted

MISSING = "(missing)"
"""Text shown as the value of a key that was not given."""

Homes = Mapping[str, Sequence[str]]
"""Full paths of keys, such as ``optimizer.lr``, by their last word."""

NO_HOMES: Homes = {}

_ELSEWHERE = {
    "context_parallel": "parallel.sequence_parallel_degree, with sequence_parallel=ulysses",
    "tensor_parallel": "parallel.sequence_parallel_degree, with sequence_parallel=megatron",
}
"""What other programs' keys with these first words are called here."""

_SHOWN_PROBLEMS = 20
RULE_CHARACTERS = 1000
"""Characters of a rule that a message shows at most."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a configuration.

    Attributes:
        path: Path of the key; "" if there is none.
        value: Value as it was written; "" if there is none.
        rule: Rule that the value breaks, and what to write instead.
    """

    path: str
    value: str
    rule: str

    def line(self) -> str:
        """Return ``path  value  rule`` on one line; an empty path or value takes no space."""
        where = f"{one_line(self.path):<32} " if self.path else ""
        written = f"{one_line(self.value):<16} " if self.value else ""
        return f"  {where}{written}{one_line(self.rule, most=RULE_CHARACTERS)}".rstrip()


class ConfigError(ValueError):
    """Configuration with one or more problems; the message lists one screen of them."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{one_line(source)} has {counted(count, 'problem')}"]
        lines += [problem.line() for problem in self.problems[:_SHOWN_PROBLEMS]]
        if count > _SHOWN_PROBLEMS:
            more = count - _SHOWN_PROBLEMS
            lines.append(f"  and {more} more; sppo config check --json lists all")
        super().__init__("\n".join(lines))


def nearest(word: object, choices: Iterable[object]) -> str:
    """Return ``" Did you mean 'flops'?"`` with the choice nearest to `word`; "" if none is near."""
    said = str(word)[:QUOTE_CHARACTERS]  # longer words match no choice, and are slow to compare
    close = difflib.get_close_matches(said, [str(c) for c in choices], n=1, cutoff=0.55)
    return f" Did you mean '{close[0]}'?" if close else ""


def unknown_key(
    path: str,
    key: str,
    value: object,
    known: Iterable[str],
    *,
    homes: Homes = NO_HOMES,
) -> Problem:
    """Return the problem of a key that does not exist in its section.

    Args:
        path: Full path of the key.
        key: Last word of the path.
        value: Value given to the key.
        known: Keys that exist in the section.
        homes: Full paths of keys in other sections.
    """
    known = sorted(known)
    here = next((here for first, here in _ELSEWHERE.items() if key.startswith(first)), None)
    if here is not None:
        hint = f" Here it is {here}."
    elif key in homes:
        hint = f" Did you mean {' or '.join(homes[key])}?"
    else:
        hint = nearest(key, known) or f" Known keys: {', '.join(known)}"
    return Problem(path, quoted(value), f"unknown key.{hint}")


def problems_of(
    error: ValidationError,
    section: str,
    annotations: Mapping[str, Any],
    *,
    homes: Homes = NO_HOMES,
) -> list[Problem]:
    """Return one :class:`Problem` per path at which pydantic found an error.

    Args:
        error: Error from validating one section.
        section: Name of the section.
        annotations: Types of the keys of the section.
        homes: Full paths of keys in all sections.
    """
    by_path: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors():
        names = tuple(str(part) for part in detail["loc"] if not _is_union_branch(part))
        by_path.setdefault(names, []).append(detail)
    return [_problem(d, names, section, annotations, homes) for names, d in by_path.items()]


def _problem(
    details: Sequence[ErrorDetails],
    names: tuple[str, ...],
    section: str,
    annotations: Mapping[str, Any],
    homes: Homes,
) -> Problem:
    """Return the problem at ``names``; several details are errors of the branches of a union."""
    path = ".".join(part for part in (section, *names) if part)
    value, kind = details[0].get("input"), details[0]["type"]
    if kind == "missing":
        return Problem(path, MISSING, "required")
    if kind == "extra_forbidden":
        return unknown_key(path, names[-1], value, _siblings(names, annotations), homes=homes)
    shown = "" if isinstance(value, dict) and not names else quoted(value)
    literals = list(_literals(_annotation_of(names, annotations)))
    if not any(detail["type"] == "literal_error" for detail in details) or not literals:
        return Problem(path, shown, _rule(details[0]))
    hint = nearest(_named_here(value, literals), literals)
    other = next((d for d in details if d["type"] != "literal_error"), None)
    if other is None or hint:
        return Problem(path, shown, f"not one of {', '.join(literals)}.{hint}")
    return Problem(path, shown, f"neither {' nor '.join(literals)} nor valid: {_rule(other)}")


def _named_here(value: object, literals: Sequence[str]) -> object:
    """Return `value`, or the name here of a compute dtype that `value` names as torch does."""
    if tuple(literals) != get_args(ComputeDtype):
        return value
    return TORCH_DTYPES.get(str(value).removeprefix("torch."), value)


def _rule(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    prefix = "Input should be "
    return f"must be {message.removeprefix(prefix)}" if message.startswith(prefix) else message


def _is_union_branch(part: object) -> bool:
    """Return whether `part` of an error location names a branch of a union instead of a key."""
    return isinstance(part, str) and (
        part.startswith(("literal[", "constrained-", "function-")) or part in ("int", "float")
    )


def _annotation_of(names: Sequence[str], annotations: Mapping[str, Any]) -> Any:
    """Return the type at ``names``; None if the path leads through a value without keys."""
    siblings = _siblings(names, annotations)
    return siblings.get(names[-1]) if names else None


def _siblings(names: Sequence[str], annotations: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the types of the keys of the mapping that contains the last of ``names``."""
    for name in names[:-1]:
        annotations = _fields_of(annotations.get(name))
    return annotations


def _fields_of(annotation: Any) -> dict[str, Any]:
    """Return the types of the keys of a section, also in ``Section | None``."""
    for choice in (annotation, *get_args(annotation)):
        if hasattr(choice, "model_fields"):
            return {key: info.annotation for key, info in choice.model_fields.items()}
    return {}


def _literals(annotation: object) -> Iterator[str]:
    """Yield the literals that an annotation allows, also in unions."""
    for argument in get_args(annotation):
        if isinstance(argument, str):
            yield argument
        else:
            yield from _literals(argument)
