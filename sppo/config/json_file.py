"""Strict reading of JSON from users: every error is one line.

Stricter than :mod:`json` about values that would cause an error later: NaN and infinity, numbers
beyond a float, nesting that exhausts the stack, duplicate keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sppo.config.text_file import NotTextError, read_text_file
from sppo.quoting import one_line, quoted

_MOST_BYTES = 256 << 20
_MOST_LEVELS = 100
_MOST_DIGITS = 300
"""Most digits of a whole number; a float holds up to 308."""

_TOKEN = re.compile(
    r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]|-?Infinity|NaN|-?[0-9][-+.0-9eE]*', re.DOTALL
)


class JsonError(ValueError):
    """JSON that cannot be used; the message names the file, the position and the rule."""


class _RefusedError(ValueError):
    """Value refused during parsing, where its position is not known."""


def read_json(path: Path) -> Any:
    """Return the value in the JSON file `path`.

    Raises:
        JsonError: The file is not UTF-8, not JSON, or breaks a rule of this module.
        OSError: The file cannot be read.
    """
    try:
        text = read_text_file(path, most_bytes=_MOST_BYTES)
    except NotTextError as error:
        raise JsonError(str(error)) from None
    return parse_json(text, source=str(path))


def parse_json(text: str | bytes, *, source: str, strict: bool = True) -> Any:
    """Return the value of a JSON text.

    Args:
        text: One JSON value.
        source: Name of the text in messages.
        strict: Refuse NaN, infinity, numbers beyond a float and duplicate keys. False accepts them,
            for texts of which only a few values are used.

    Raises:
        JsonError: The text is not UTF-8, not JSON, nested too deeply, or breaks a rule of `strict`.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = _parse(decoded, strict=strict)
    except UnicodeDecodeError as error:
        raise JsonError(f"{one_line(source)}: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        rule = f"not JSON: {one_line(error.msg)}"
        raise _error(source, decoded, error.pos, rule) from None
    except RecursionError:
        raise _too_deep(source, decoded) from None
    except _RefusedError as error:
        raise _error(source, decoded, _first_refused(decoded), str(error)) from None
    if decoded.count("[") + decoded.count("{") > _MOST_LEVELS and _is_deep(value):
        raise _too_deep(source, decoded)
    return value


def _parse(text: str, *, strict: bool) -> Any:
    if not strict:
        return json.loads(text, parse_int=float)  # Python refuses to read thousands of digits
    return json.loads(
        text,
        parse_int=_whole,
        parse_float=_finite,
        parse_constant=_refuse_constant,
        object_pairs_hook=_unique,
    )


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise _RefusedError(f"a number of {len(text)} digits; at most {_MOST_DIGITS} can be read")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _RefusedError(f"{one_line(text)} is beyond every number that can be computed with")
    return value


def _refuse_constant(name: str) -> float:
    raise _RefusedError(f"{name} is not JSON: write a number, or null")


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedError(f"key {quoted(key)} stands twice in one object; keep one")
            seen.add(key)
    return mapping


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _too_deep(source: str, text: str) -> JsonError:
    depth, position = 0, 0
    for token in _TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > _MOST_LEVELS:
            position = token.start()
            break
    return _error(source, text, position, f"nested more than {_MOST_LEVELS} levels deep")


def _first_refused(text: str) -> int | None:
    """Return the position of the first refused number; None for a key, which the message names."""
    for token in _TOKEN.finditer(text):
        word = token[0]
        if word[0] in '"[]{}':
            continue
        if len(word) > _MOST_DIGITS or word[-1] in "Ny" or math.isinf(_as_float(word)):
            return token.start()
    return None


def _as_float(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return 0.0


def _error(source: str, text: str, position: int | None, rule: str) -> JsonError:
    if position is None:
        return JsonError(f"{one_line(source)}: {rule}")
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    where = f"line {line}, column {column}" if "\n" in text.strip() else f"column {column}"
    return JsonError(f"{one_line(source)}: {rule.removesuffix(' at')} ({where})")
