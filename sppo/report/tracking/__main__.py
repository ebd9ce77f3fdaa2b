"""Process that sends the records of one run to its trackers.

Run as ``python -m sppo.report.tracking``. The first line of the standard input is the request; its
end, also when the process that writes it is killed, is the end of the run. Messages are lines
``LEVEL text`` on the standard output.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from threading import Event, Thread

from sppo.config.track import TrackerName
from sppo.report.tracking.sending import Sending
from sppo.report.tracking.track_file import TrackFile, only_sender
from sppo.report.tracking.trackers import TrackedRun

_LONGEST_END_S = 600
"""Seconds after the end of the run after which the process ends, whatever has not arrived."""


def main() -> None:
    """Send records until the standard input ends; exit with 1 if some could not be sent."""
    handler = logging.StreamHandler(os.fdopen(os.dup(1), "w"))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what packages print, and their processes
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log = logging.getLogger("sppo")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the run, which then ends
        signal.signal(number, signal.SIG_IGN)
    request = json.loads(sys.stdin.readline())
    run = TrackedRun(**request["run"])
    try:
        sent_all = _send(run, request["trackers"])
    except (OSError, ValueError) as error:  # of the files of what was sent
        log.warning("warning: nothing is sent to %s: %s", ", ".join(request["trackers"]), error)
        sent_all = False
    sys.exit(0 if sent_all else 1)


def _send(run: TrackedRun, trackers: list[TrackerName]) -> bool:
    """Send records by a thread for each tracker; return whether all were sent."""
    directory, ended = Path(run.directory), Event()
    with only_sender(directory):
        file = TrackFile(directory)
        sendings = [Sending(name, run, file) for name in trackers]
        threads = [Thread(target=sending.run, args=(ended,)) for sending in sendings]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        ended.set()
        signal.alarm(_LONGEST_END_S)
        for thread in threads:
            thread.join()
    return all(sending.error is None for sending in sendings)


if __name__ == "__main__":
    main()
