"""Start and end of the process that sends the records of a run to its trackers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread

from sppo.config.json_file import read_json
from sppo.config.run import RunConfig
from sppo.config.start_model import CONFIG_FILE
from sppo.config.track import TrackConfig, TrackerName
from sppo.parallel.job.environment import with_module_path
from sppo.report.tracking.trackers import TrackedRun
from sppo.training.run_directory import PLAN_FILE
from sppo.version import __version__

_log = logging.getLogger(__name__)

_WAIT_S = 15.0
"""Longest time that the end of a run waits for trackers."""


Say = Callable[[int, str], None]
"""Function that is given a level of logging and a message."""


@contextmanager
def tracked(run: RunConfig, output: Path) -> Iterator[None]:
    """Send what the run records during the context to its trackers, from another process.

    Nothing that happens there is an error of the run. At the end of the context the process sends
    the rest, even if this process was killed.
    """
    names = ", ".join(run.trackers)
    try:
        sending = SendingProcess(output, run.track, run.trackers, say=_log.log)
    except (OSError, ValueError) as error:
        _log.warning("warning: nothing is sent to %s: %s", names, error)
        yield
        return
    try:
        yield
    finally:
        try:
            sending.end(timeout_s=_WAIT_S)
        except subprocess.TimeoutExpired:
            going_on = "warning: process %d still sends to %s, and goes on after the run"
            _log.warning(going_on, sending.pid, names)


class SendingProcess:
    """Process that sends the records of a run until :meth:`end`, or until this process ends.

    Args:
        output: Directory of the run, which has its configuration.
        track: Project, name, group and tags.
        trackers: Names of the trackers.
        say: Called with each message of the process, by a thread.

    Raises:
        OSError: The process cannot be started, or the configuration cannot be read.
        ValueError: The configuration or the plan is damaged.
    """

    def __init__(
        self, output: Path, track: TrackConfig, trackers: Sequence[TrackerName], *, say: Say
    ) -> None:
        request = {"run": asdict(_described(output, track)), "trackers": list(trackers)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sppo.report.tracking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=with_module_path(os.environ),
            start_new_session=True,  # without the signals of this process's terminal
        )
        self.pid, self._output, self._say = self._process.pid, output, say
        self._reader = Thread(target=self._pass_on, daemon=True)
        self._reader.start()
        assert self._process.stdin is not None, "it was asked for"
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def end(self, *, timeout_s: float | None = None) -> int:
        """Wait until the rest is sent, and return 0, or another number if something was not sent.

        Raises:
            subprocess.TimeoutExpired: The process did not end in time; it continues.
        """
        assert self._process.stdin is not None, "it was asked for"
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        code = self._process.wait(timeout_s)
        self._reader.join()
        if code < 0:
            missing = f"sppo track {self._output} sends later what is missing"
            why = f"the process that sends to trackers was ended by signal {-code}"
            self._say(logging.WARNING, f"warning: {why}; {missing}")
        return code

    def _pass_on(self) -> None:
        """Pass on the messages of the process until it ends."""
        assert self._process.stdout is not None, "it was asked for"
        for line in self._process.stdout:
            level, _, text = line.rstrip("\n").partition(" ")
            self._say(logging.getLevelNamesMapping().get(level, logging.WARNING), text)


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
