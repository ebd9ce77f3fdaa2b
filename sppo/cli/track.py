"""``sppo track``: send the records of a run to trackers, after the run or beside it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sppo.cli.exit_codes import exit_codes
from sppo.config.json_file import read_json
from sppo.config.loading import read_keys
from sppo.config.start_model import CONFIG_FILE
from sppo.config.track import TrackConfig
from sppo.report.lines import for_stderr, print_line
from sppo.report.tracking.trackers import check_package
from sppo.training.records.tracking import SendingProcess


def track(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="The directory train.output of a run.")
    ],
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Keys of the section track, e.g. project=long name=first; without them as the run"
            " has them.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACKER",
            help="tensorboard, wandb, trackio or mlflow; may be given several times. Without it"
            " those of the run.",
        ),
    ] = None,
) -> None:
    """Send the records of a run to experiment trackers, those that it has not sent yet.

    Reads metrics.jsonl and validation.jsonl of the run, which may still be training: for machines
    that train without a network. RUN/track.json has what each tracker has received.

        sppo track runs/default --to wandb
    """
    with exit_codes():
        chosen = _chosen(directory, to, keys or [])
        for tracker in chosen.to:
            check_package(tracker)
        complete = SendingProcess(directory, chosen, chosen.to, say=_say).end() == 0
    if not complete:
        raise typer.Exit(1)


def _say(level: int, text: str) -> None:
    """Print a message of the process that sends."""
    if level < logging.WARNING:
        print_line(text, Console())
    else:
        typer.echo(for_stderr(text), err=True)


def _chosen(directory: Path, to: list[str] | None, keys: list[str]) -> TrackConfig:
    """Return the section `track` of the run, with the keys of the command line.

    Raises:
        ValueError: The directory is no run's, or no tracker is named.
    """
    config = directory / CONFIG_FILE
    if not config.is_file():
        raise ValueError(f"{directory}: no {CONFIG_FILE} there, so it is no run's directory")
    run = read_json(config)
    section = dict(run.get("track") or {})
    if run.get("train", {}).get("tensorboard"):
        section["to"] = ["tensorboard", *section.get("to", ())]
    chosen = read_keys(TrackConfig, keys, defaults=section | ({"to": to} if to else {}))
    if not chosen.to:
        raise ValueError(f"{directory}: the run names no tracker; give --to TRACKER")
    return chosen
