"""Bars and messages on one terminal: every line is complete, nothing is left behind.

A small terminal emulator replays the output and returns the final screen.
"""

import io
import logging
import re
import sys
import time

import pytest
from rich.console import Console

from sppo.report.display import LogHandler, TrainingDisplay, logging_to


class _Terminal(io.StringIO):
    """Text that rich takes for a terminal's."""

    def isatty(self):
        return True


def _screen(written, *, width):
    """Lines on a terminal after ``written``: text, new lines, carriage returns, up, erase line."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]", written):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.endswith("A"):
            row -= int(token[2:-1] or 1)
        elif token.endswith("K"):
            lines[row] = ""
        elif not token.startswith("\x1b"):
            if column == width:
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


def _train(console, log):
    """Three steps with a message after each, on a live display."""
    with TrainingDisplay(console, total_steps=3, first_step=0) as display:
        for step in range(1, 4):
            display.step_begins(num_actions=2)
            display.action()
            time.sleep(0.12)  # the bars are redrawn ten times a second
            display.step_done(f"step {step} " + "of a line that is longer than eighty " * 3)
            log.info("saved step %d", step)
            time.sleep(0.12)


@pytest.fixture
def log(monkeypatch):
    """A logger whose messages go nowhere but to the handlers a test adds."""
    log = logging.Logger("test")
    monkeypatch.setattr(log, "propagate", False)
    return log


def test_messages_stand_above_bars_that_leave_nothing_behind(log, monkeypatch):
    width = 80
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console(file=terminal, force_terminal=True, width=width, color_system=None)
    log.addHandler(LogHandler(console))
    _train(console, log)
    screen = _screen(terminal.getvalue(), width=width)
    said = "of a line that is longer than eighty " * 3
    assert " ".join(screen) == " ".join(
        f"step {step} {said}saved step {step}" for step in range(1, 4)
    )


@pytest.mark.parametrize("to_terminal", [True, False])
def test_a_redirected_stderr_gets_the_warnings_alone(log, monkeypatch, to_terminal):
    """What a run does is told in one order, on stdout."""
    stdout = _Terminal() if to_terminal else io.StringIO()
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    console = Console(file=stdout, force_terminal=to_terminal, width=200, color_system=None)
    log.addHandler(LogHandler(console))
    _train(console, log)
    log.warning("damaged")
    assert stderr.getvalue() == "damaged\n"
    shown = _screen(stdout.getvalue(), width=200) if to_terminal else stdout.getvalue().split("\n")
    told = [re.match(r"(saved )?step \d", line)[0] for line in shown if line]
    assert told == [f"{what} {step}" for step in range(1, 4) for what in ("step", "saved step")]
    assert ("━" in stdout.getvalue()) == to_terminal


def test_messages_of_libraries_stand_above_the_bars_too(log, monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console(file=terminal, force_terminal=True, width=80, color_system=None)
    with TrainingDisplay(console, total_steps=3, first_step=0):
        print("a warning", file=sys.stderr)
        time.sleep(0.12)
    assert _screen(terminal.getvalue(), width=80) == ["a warning"]


def bare_root(monkeypatch):
    """The root logger of a program that has not set up logging; called when pytest's is there."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    return logging.getLogger()


def test_messages_are_shown_while_a_run_lasts(monkeypatch, capsys):
    root, own = bare_root(monkeypatch), logging.getLogger("sppo")
    with logging_to(Console()):
        own.info("going on")
    own.info("after the run")
    assert capsys.readouterr().out == "going on\n"
    assert (root.handlers, own.level) == ([], logging.NOTSET)


def test_a_handler_of_sppo_alone_is_enough(monkeypatch):
    root, own = bare_root(monkeypatch), logging.getLogger("sppo")
    monkeypatch.setattr(own, "handlers", [logging.NullHandler()])
    with logging_to(Console()):
        assert root.handlers == []


def test_without_a_console_only_warnings_are_shown(monkeypatch, capsys):
    bare_root(monkeypatch)
    with logging_to(None):
        logging.getLogger("sppo").info("going on")
        logging.getLogger("sppo").warning("damaged")
    assert capsys.readouterr().err == "damaged\n"


def test_a_program_that_handles_messages_goes_on_to(monkeypatch, capsys):
    heard = []

    class Heard(logging.Handler):
        def emit(self, record):
            heard.append(record.getMessage())

    bare_root(monkeypatch).handlers = [Heard()]
    with logging_to(Console()):
        logging.getLogger("sppo").warning("once")
    assert (heard, capsys.readouterr().err) == (["once"], "")
