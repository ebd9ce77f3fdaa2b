"""Problems of a run configuration, worded by the keys and values that the user wrote."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from typing import get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sppo.config.base import Section
from sppo.config.other_names import words_about
from sppo.config.run import RunConfig
from sppo.quoting import QUOTE_CHARACTERS, one_line, quoted
from sppo.units import counted

MISSING = "(missing)"
"""Text shown as the value of a key that was not given."""
_NAME = "NAME"
"""What stands for the name or number of one of several sections, in paths of keys."""

_NO_SUCH_KEY = ("extra_forbidden", "invalid_key")
_UNREADABLE = ("int_parsing", "float_parsing", "bool_parsing")
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


Keys = Mapping[str, Sequence[str]]
"""Keys of every section by its path."""


def section_keys(section: type[Section], path: str = "") -> dict[str, list[str]]:
    """Return the keys of a section and of the sections within it, by the path of each.

    In the path of a section that the user names or that is one of a list, such as
    ``data.sources.NAME``, ``NAME`` stands for the name or number.
    """
    keys = {path: sorted(section.model_fields)}
    for name, field in section.model_fields.items():
        inner = f"{path}.{name}".lstrip(".")
        for within, choice in _sections_of(field.annotation, inner):
            keys |= section_keys(choice, within)
    return keys


def _sections_of(annotation: object, path: str) -> Iterator[tuple[str, type[Section]]]:
    """Yield each section that a value of a type may be or hold, and its path."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield path, annotation
    within = f"{path}.{_NAME}" if get_origin(annotation) in (dict, tuple) else path
    for choice in get_args(annotation):
        yield from _sections_of(choice, within)


RUN_KEYS: Keys = section_keys(RunConfig)
"""Keys of every section by its path: "" is the run file, ``model.rope_scaling`` a deeper one."""


def _key_paths() -> dict[str, list[str]]:
    paths: dict[str, list[str]] = {}
    for section, keys in RUN_KEYS.items():
        for key in keys if section and not section.endswith(_NAME) else ():
            paths.setdefault(key, []).append(f"{section}.{key}")
    return paths


KEY_PATHS = _key_paths()
"""Full paths, such as ``optimizer.lr``, by last word; without those in sections that users name."""


def problems_of(error: ValidationError, *within: str, keys: Keys = RUN_KEYS) -> list[Problem]:
    """Return one :class:`Problem` per path at which pydantic found an error.

    Args:
        error: Error from validating a run, one of its sections, or a request.
        within: Name of the section; none for a run or a request.
        keys: Keys of every section by its path.
    """
    by_path: dict[tuple[str, ...], list[ErrorDetails]] = {}
    errors = error.errors()
    owners = {detail["loc"][:-1] for detail in errors}
    for detail in errors:
        if detail["type"] == "too_short" and detail["loc"] in owners:
            continue  # a list whose elements are all wrong counts as empty
        # Without the names of branches of unions; an unknown key may have such a name.
        names = list(filterfalse(_is_union_branch, (*within, *detail["loc"])))
        if detail["type"] in _NO_SUCH_KEY and _is_union_branch(detail["loc"][-1]):
            names.append(detail["loc"][-1])
        by_path.setdefault(tuple(map(str, names)), []).append(detail)
    return [
        problem for names, details in by_path.items() for problem in _problem(details, names, keys)
    ]


def _is_union_branch(part: object) -> bool:
    """Return whether `part` of an error location names a branch of a union instead of a key."""
    return isinstance(part, str) and (
        part.startswith(("literal[", "constrained-", "function-"))
        or part in ("int", "float", "HardwareConfig", "[key]")
    )


def _problem(
    details: Sequence[ErrorDetails], names: tuple[str, ...], keys: Keys
) -> Iterator[Problem]:
    """Yield the problem at ``names``; several details are errors of the branches of a union."""
    path = ".".join(names)
    value, kind = details[0].get("input"), details[0]["type"]
    is_section = len(names) == 1 and path in keys
    if kind in _NO_SUCH_KEY:
        yield _unknown_key(names, value, keys)
    elif kind == "missing":
        yield Problem(path, MISSING, "required")
    elif is_section and not isinstance(value, dict):
        yield Problem(path, quoted(value), _section_rule(path))
    elif is_section or not names:  # a rule across the keys of a section, or of the whole run
        rules = [_rule(detail) for detail in details if detail["type"] != "literal_error"]
        yield from (Problem(path, "", rule) for rule in rules)
    else:
        yield Problem(path, quoted(value), _value_rule(details))


def _unknown_key(names: tuple[str, ...], value: object, keys: Keys) -> Problem:
    """Return the problem of a key that does not exist in its section."""
    *within, key = names
    path, named = ".".join(names), ".".join([*within[:-1], _NAME])
    known = keys[named if named in keys else ".".join(within)]
    elsewhere = words_about(path) if keys is RUN_KEYS and named not in keys else ""
    if elsewhere:
        hint = f" {elsewhere}"
    elif keys is RUN_KEYS and key in KEY_PATHS:
        hint = f" Did you mean {' or '.join(KEY_PATHS[key])}?"
    else:
        hint = nearest(key, known) or f" Known keys: {', '.join(known)}"
    return Problem(path, quoted(value), f"unknown key.{hint}")


def _section_rule(section: str) -> str:
    rule = "a section is a mapping of keys to values" + " or auto" * (section == "hardware")
    if section == "adapter":
        rule += ", such as {rank: 16}"
    if "preset" in RUN_KEYS[section]:
        rule += f"; a preset is named by {section}.preset"
    return rule


def _value_rule(details: Sequence[ErrorDetails]) -> str:
    """Return the rule that a value breaks; several details are those of the branches of a union."""
    wanted = next((d["ctx"]["expected"] for d in details if d["type"] == "literal_error"), "")
    words = re.findall("'([^']*)'", wanted)
    if not words:
        return _rule(details[0])
    hint = nearest(details[0]["input"], words)
    other = next((d for d in details if d["type"] != "literal_error"), None)
    if other is None or hint:
        return f"not one of {', '.join(words)}.{hint}"
    return f"neither {' nor '.join(words)} nor valid: {_rule(other)}"


def _rule(detail: ErrorDetails) -> str:
    if detail["type"] == "model_type":
        return "must be a mapping of keys to values"
    if detail["type"] == "too_short":
        return "must not be empty"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] in _UNREADABLE:
        message = message.partition(",")[0]  # the rest says that the text is none
    prefix = "Input should be "
    return f"must be {message.removeprefix(prefix)}" if message.startswith(prefix) else message
