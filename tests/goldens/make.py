"""Writes the golden answers of the code as it is: ``python -m tests.goldens.make [KIND ...]``."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable
from itertools import count, islice
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


_CASES: dict[str, tuple[Iterable[str], int | None]] = {
    "solutions": (runs.requests(), None),
    "memory": (map(runs.drawn_run, count()), 100),
    "programs": (map(str, count()), 200),
    "short_losses": (read("short_losses"), None),
    "trained_losses": (runs.TRAINED, None),
}
"""Cases of every kind, and how many of those that are not refused are kept; None for all."""


def make(kind: str) -> None:
    """Write the golden answers of one kind, one a line, and print how many there are so far."""
    cases, most = _CASES[kind]
    answered = ((case, answer) for case in cases if (answer := ANSWERS[kind](case)) is not None)
    lines = []
    for case, answer in islice(answered, most):
        lines.append(f"{json.dumps(case)}: {json.dumps(answer)}")
        print(f"\r{kind}: {len(lines)}", end="", flush=True)
    print()
    _file(kind).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("sppo").setLevel(logging.ERROR)
    for name in sys.argv[1:] or ANSWERS:
        make(name)
