"""Arguments of several commands, and the loading of the run file of a planning command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sppo.config import RunConfig, load_run

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SECTION.KEY=VALUE]...",
        help="Values that replace those of the file, e.g. train.steps=20 sequence.length=64Ki.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

_NOTE = (
    "data.samples=documents: planned for the longest samples, of sequence.length tokens; each step "
    "is planned when sppo train knows its samples"
)


def load_planned_run(run_file: Path, overrides: Sequence[str]) -> RunConfig:
    """Load a run file for planning.

    With ``data.samples=documents`` a note on stderr says for which samples the run is planned.

    Raises:
        ValueError: The run file cannot be used.
    """
    run = load_run(run_file, overrides)
    if run.data.samples == "documents":
        typer.echo(_NOTE, err=True)
    return run
