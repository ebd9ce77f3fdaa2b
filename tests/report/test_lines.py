"""Lines break between words on a terminal, and nowhere else."""

import io
import logging
import os
import sys

import pytest
from rich.console import Console

from sppo.report.lines import StderrFormatter, for_stderr, print_line

TEXT = "  the other 1.1 ms passed between compute actions, /a/path/that/is/longer/than/a/line"
BROKEN = """\
  the other 1.1 ms passed
   between compute actions,
   /a/path/that/is/longer/than/a/line
"""


@pytest.mark.parametrize(
    ("terminal", "columns", "wraps", "printed"),
    [
        (True, None, True, BROKEN),
        (False, "28", True, BROKEN),
        (False, None, True, f"{TEXT}\n"),
        (True, None, False, f"{TEXT}\n"),
    ],
)
def test_words_are_never_broken(monkeypatch, terminal, columns, wraps, printed):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=28, color_system=None)
    print_line(TEXT, console, indent=1, wraps=wraps)
    assert file.getvalue() == printed


def test_errors_and_warnings_break_between_words(monkeypatch):
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((28, 24)))
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    record = logging.LogRecord("sppo", logging.WARNING, "", 0, "warning: %s", (TEXT,), None)
    for text in (for_stderr(f"error: {TEXT}"), StderrFormatter().format(record)):
        lines = text.splitlines()
        assert " ".join(text.split()).endswith(" ".join(TEXT.split()))
        assert max(len(line) for line in lines if "/" not in line) <= 28 < len(TEXT)


def test_no_columns_end_no_run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    print_line("two words", Console(file=io.StringIO()))
