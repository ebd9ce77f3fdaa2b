"""``sppo doctor``: what this machine offers, and what to do about what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sppo.cli.arguments.common import Json
from sppo.cli.exit_codes import exit_codes

if TYPE_CHECKING:
    from sppo.interface.doctor import Finding

_SIGNS = {"ok": "ok", "note": "note", "missing": "-", "broken": "BROKEN"}
BROKEN = 1
"""Exit code where something is there and does not work."""
_LEAST_COLUMNS = 40
"""Narrower, a table has no room for what was found; a terminal breaks lines itself."""


def doctor(
    hardware: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file of sppo bench, to show what was measured."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Look at this machine: what training and planning find here, and how to get what is missing.

    Nothing is measured, changed or downloaded. Exit code 1: something every run needs is broken, or
    FILE is.

        sppo doctor
        sppo doctor --hardware hardware.json --json
    """
    with exit_codes():
        from sppo.interface.doctor import examine

        findings = examine(hardware)
    if json_output:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        _show(findings)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(BROKEN)


def _show(findings: Sequence[Finding]) -> None:
    """A table for each subject: what was found, and below it what to do."""
    from itertools import groupby

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.width = max(console.width, _LEAST_COLUMNS)
    for subject, group in groupby(findings, key=lambda finding: finding.subject):
        console.print(Text(subject, style="bold"))
        table = Table(box=None, show_header=False, padding=(0, 1))
        table.add_column(no_wrap=True, min_width=6)
        table.add_column(no_wrap=True, min_width=14)
        table.add_column(overflow="fold")
        for finding in group:
            lines = [finding.found, *([finding.advice] if finding.advice else [])]
            table.add_row(_SIGNS[finding.state], Text(finding.name), Text("\n".join(lines)))
        console.print(table)
