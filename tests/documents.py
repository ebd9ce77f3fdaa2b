"""Parser of the README and the documentation pages, for tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str


def pages() -> list[Path]:
    """Return the README and all pages below docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [Block(language, text.strip()) for language, text in found]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def statements(code: str) -> Iterator[str]:
    """Yield the commands of shell code, lines that go on and what is read from below with them."""
    lines = iter(code.splitlines())
    for line in lines:
        while line.endswith("\\"):
            line += "\n" + next(lines)
        heredoc = _HEREDOC.search(line)
        if heredoc is not None:
            for below in lines:
                line += "\n" + below
                if below.strip() == heredoc[1]:
                    break
        yield line
