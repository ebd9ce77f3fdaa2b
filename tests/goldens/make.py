"""Writes the golden answers of the code as it is: ``python -m tests.goldens.make [KIND ...]``."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from tests.goldens import programs, runs
from tests.goldens.runs import Answer

ANSWERS: dict[str, Callable[[str], Answer | None]] = {
    "solutions": runs.solution,
    "memory": runs.memory,
    "programs": programs.answer,
    "short_losses": runs.short_losses,
    "trained_losses": runs.trained_losses,
}
"""Function that answers a case, by kind. The golden answers of a kind are in one file."""


def _file(kind: str) -> Path:
    return Path(__file__).with_name(f"{kind}.json")


def read(kind: str) -> dict[str, Answer]:
    """Return the golden answers of one kind, by case."""
    answers: dict[str, Answer] = json.loads(_file(kind).read_text(encoding="utf-8"))
    return answers


def make(kind: str) -> None:
    """Answer the cases of one kind anew: requests as they are listed, others as they are kept."""
    cases = runs.requests() if kind == "solutions" else read(kind)
    lines = [f"{json.dumps(case)}: {json.dumps(ANSWERS[kind](case))}" for case in cases]
    _file(kind).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("sppo").setLevel(logging.ERROR)
    for name in sys.argv[1:] or ANSWERS:
        make(name)
