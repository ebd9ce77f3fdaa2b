"""Hardware descriptions as JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sppo.config.json_file import JsonError, read_json
from sppo.config.problems import RULE_CHARACTERS
from sppo.hardware.description import HardwareSpec
from sppo.quoting import one_line, quoted

_ADAPTER = TypeAdapter(HardwareSpec)
_FIX = "sppo bench all -o FILE writes a good one"
_SHOWN_PROBLEMS = 5


def read_hardware(path: Path) -> HardwareSpec:
    """Read a hardware description from a JSON file, as ``sppo bench -o`` writes it.

    Raises:
        ValueError: The file is not JSON, or fields are missing, unknown or out of range; the
            message names the first five.
        OSError: The file cannot be read.
    """
    try:
        # JSON is parsed strictly, so that neither true nor "1" counts as 1.
        return _ADAPTER.validate_json(json.dumps(read_json(path)), strict=True)
    except ValidationError as error:
        raise ValueError(f"hardware file {path}: {_problems(error)}; {_FIX}") from None
    except JsonError as error:
        raise ValueError(f"hardware file {error}; {_FIX}") from None


def hardware_json(spec: HardwareSpec) -> dict[str, Any]:
    """Return `spec` as the plain values that its JSON file contains."""
    return asdict(spec)


def _problems(error: ValidationError) -> str:
    """Return a message with the first problems of `error`, each with its path and its value."""
    shown = []
    for problem in error.errors(include_url=False)[:_SHOWN_PROBLEMS]:
        where = one_line(".".join(map(str, problem["loc"]))) or "file"
        rule = one_line(problem["msg"].removeprefix("Value error, "), most=RULE_CHARACTERS)
        value = problem["input"]
        found = f" (found {quoted(value)})" if isinstance(value, str | int | float) else ""
        shown.append(f"{where}: {rule}{found}")
    return "; ".join(shown)
