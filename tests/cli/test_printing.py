"""The sign of life of a long search shows any text as it is."""

import io

import pytest
from rich.console import Console

from sppo.cli import printing as module


@pytest.mark.parametrize("text", ["solving for lab box [/red] two", "solving for [lab]"])
def test_brackets_on_a_terminal_are_text(text, monkeypatch):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80)
    monkeypatch.setattr(module, "Console", lambda **_: console)
    with module.working(text):
        pass
    assert text in written.getvalue()
