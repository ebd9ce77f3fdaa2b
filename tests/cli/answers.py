"""Answers of commands."""

from __future__ import annotations

import json
from typing import Any

from tests.conftest import call


def answer(*words: object, code: int = 0) -> Any:
    """Return what a command prints with ``--json``: one line, and nothing else."""
    result = call(*words, "--json")
    assert result.exit_code == code, result.output
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    return json.loads(result.stdout)


def one_line(text: str) -> str:
    """Return text without line breaks and indentation."""
    return " ".join(text.split())
