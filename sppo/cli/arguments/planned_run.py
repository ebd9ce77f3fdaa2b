"""Loading of the run file of a planning command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from sppo.config import RunConfig

PLANNED_FOR_LONGEST = (
    "data.samples=documents: planned for the longest samples, of sequence.length tokens; each step "
    "is planned when sppo train knows its samples"
)


def load_planned_run(run_file: Path, overrides: Sequence[str]) -> RunConfig:
    """Load a run file for planning.

    With ``data.samples=documents`` a note on stderr says for which samples the run is planned.

    Raises:
        ValueError: The run file cannot be used.
    """
    from sppo.config import load_run
    from sppo.config.run_warnings import log_run_warnings

    run = load_run(run_file, overrides)
    log_run_warnings(run)
    if run.data.samples == "documents":
        typer.echo(PLANNED_FOR_LONGEST, err=True)
    return run
