"""Lines that name the files a command has written."""

from __future__ import annotations

from pathlib import Path

import typer


def say_written(*files: Path | None) -> None:
    """Print a line for each file that was asked for."""
    for file in files:
        if file is not None:
            typer.echo(f"written {file}")
