"""Start and end of the process that sends the records of a run to its trackers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import IO

from sppo.config.json_file import read_json
from sppo.config.run import RunConfig
from sppo.config.start_model import CONFIG_FILE
from sppo.config.track import TrackConfig, TrackerName
from sppo.parallel.job.environment import with_module_path
from sppo.report.tracking.trackers import TrackedRun
from sppo.training.run_directory import PLAN_FILE
from sppo.version import __version__

_log = logging.getLogger(__name__)

_WAIT_S = 30.0
"""Longest time that the end of a run waits for trackers."""


@contextmanager
def tracked(run: RunConfig, output: Path) -> Iterator[None]:
    """Send what the run records during the context to its trackers, from another process.

    Nothing that happens there is an error of the run. At the end of the context the process sends
    the rest, even if this process was killed.
    """
    try:
        process = start_sending(output, run.track, run.trackers)
    except (OSError, ValueError) as error:
        _log.warning("warning: nothing is sent to %s: %s", ", ".join(run.trackers), error)
        yield
        return
    try:
        yield
    finally:
        try:
            end_sending(process, timeout_s=_WAIT_S)
        except subprocess.TimeoutExpired:
            _log.warning(
                "warning: process %d still sends to %s, and goes on after the run",
                *(process.pid, ", ".join(run.trackers)),
            )


def start_sending(
    output: Path, track: TrackConfig, trackers: Sequence[TrackerName]
) -> subprocess.Popen[str]:
    """Start a process that sends the records of a run until :func:`end_sending`.

    Args:
        output: Directory of the run, which has its configuration.
        track: Project, name, group and tags.
        trackers: Names of the trackers.

    Raises:
        OSError: The process cannot be started, or the configuration cannot be read.
        ValueError: The configuration or the plan is damaged.
    """
    request = {"run": asdict(_described(output, track)), "trackers": list(trackers)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "sppo.report.tracking"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=with_module_path(os.environ),
        start_new_session=True,  # without the signals of this process's terminal
    )
    assert process.stdin is not None, "it was asked for"
    assert process.stdout is not None, "it was asked for"
    Thread(target=_log_lines, args=(process.stdout,), daemon=True).start()
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    return process


def end_sending(process: subprocess.Popen[str], *, timeout_s: float | None = None) -> int:
    """Wait until the rest is sent, and return 0, or another number if something was not sent.

    Raises:
        subprocess.TimeoutExpired: The process did not end in time; it continues.
    """
    assert process.stdin is not None, "it was asked for"
    with suppress(BrokenPipeError):
        process.stdin.close()
    return process.wait(timeout_s)


def _described(output: Path, track: TrackConfig) -> TrackedRun:
    """Return what trackers are told about the run in a directory."""
    config_file, plan_file = output / CONFIG_FILE, output / PLAN_FILE
    plan = read_json(plan_file) if plan_file.exists() else {}
    digests = {
        "config_digest": hashlib.sha256(config_file.read_bytes()).hexdigest(),
        "plan_digest": plan.get("program_digest"),
        "sppo_version": __version__,
    }
    return TrackedRun(
        directory=str(output.absolute()),
        project=track.project,
        name=track.name,
        group=track.group,
        tags=track.tags,
        config={**read_json(config_file), **digests},
    )


def _log_lines(lines: IO[str]) -> None:
    """Log the messages of the process until it ends."""
    for line in lines:
        level, _, text = line.rstrip("\n").partition(" ")
        _log.log(logging.getLevelNamesMapping().get(level, logging.WARNING), "%s", text)
