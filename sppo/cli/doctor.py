"""``sppo doctor``: report what this machine offers and how to add what is missing."""

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
"""Exit code if something is installed and does not work."""
_LEAST_COLUMNS = 40
"""Smallest width of a table. A narrower terminal wraps lines itself."""


def doctor(
    hardware: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file of sppo bench, to show what was measured."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Report what training and planning find on this machine, and how to add what is missing.

    Nothing is measured or downloaded; native parts of SPPO that are missing are built. Exit code 1:
    something that is installed does not work, or FILE cannot be used.

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
    """Print a table for each subject, with the advice below each finding."""
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
