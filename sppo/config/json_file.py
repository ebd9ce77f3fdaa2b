"""Strict reading of JSON from users: every error is one line.

Stricter than :mod:`json` about values that would cause an error later: NaN and infinity, numbers
beyond a float, duplicate keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sppo.quoting import one_line, quoted
from sppo.text_file import NotTextError, read_text_file

_MOST_BYTES = 256 << 20
_MOST_DIGITS = 300
"""Most digits of a whole number; a float holds up to 308."""


class JsonError(ValueError):
    """JSON that cannot be used; the message names the file, the position and the rule."""


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
        if not strict:
            return json.loads(decoded, parse_int=_whole_or_float)
        return json.loads(
            decoded,
            parse_int=_whole,
            parse_float=_finite,
            parse_constant=_refuse_constant,
            object_pairs_hook=_unique,
        )
    except UnicodeDecodeError as error:
        rule = f"byte {error.start} is not UTF-8"
    except json.JSONDecodeError as error:
        message = one_line(error.msg).removesuffix(" at")
        rule = f"not JSON: {message} (line {error.lineno}, column {error.colno})"
    except RecursionError:
        rule = "nested too deeply"
    except ValueError as error:
        rule = str(error)
    raise JsonError(f"{one_line(source)}: {rule}")


def first_problem(error: ValidationError) -> str:
    """Return the first value that a JSON file should not have: its key, the value and the rule."""
    first = error.errors()[0]
    where = one_line(".".join(map(str, first["loc"])))
    return f"{where} {quoted(first['input'])}: {first['msg']}"


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits; at most {_MOST_DIGITS} can be read")
    return int(text)


def _whole_or_float(text: str) -> float:
    """Return the number; a float if it has too many digits for Python to read it as an integer."""
    return int(text) if len(text) <= _MOST_DIGITS else float(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{one_line(text)} is beyond every number that can be computed with")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON: write a number, or null")


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {quoted(key)} stands twice in one object; keep one")
            seen.add(key)
    return mapping
