"""Sending of a run's records to one tracker, which may fail and come back."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from threading import Event

from sppo.config.track import TrackerName
from sppo.report.tracking.records import Record, RecordFiles
from sppo.report.tracking.track_file import Received, TrackFile
from sppo.report.tracking.trackers import TRACKERS, TrackedRun, Tracker, first_line
from sppo.units import counted

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_TRY_AGAIN_S = 60.0
_MOST_AT_ONCE = 50
_NONE = -1  # a validation may be of step 0


class Sending:
    """Sends the records of a run to one tracker, each once.

    Args:
        name: Name of the tracker.
        run: What the tracker is told about the run.
        file: Record of what was sent.
    """

    def __init__(self, name: TrackerName, run: TrackedRun, file: TrackFile) -> None:
        self._name, self._run, self._file = name, run, file
        self._tracker: Tracker | None = None
        self._has_failed = False
        self._num_sent = 0
        self.error: Exception | None = None
        """Error for which records are not sent; None if all were."""

    def run(self, ended: Event) -> None:
        """Send records until the run has ended and all are sent, or cannot be sent."""
        next_s = 0.0
        while True:
            is_last = ended.is_set()
            if is_last or time.monotonic() >= next_s:
                self.send_all(is_last=is_last)
                next_s = time.monotonic() + (_TRY_AGAIN_S if self.error else 0)
            if is_last:
                return
            ended.wait(_LOOK_EVERY_S)

    def send_all(self, *, is_last: bool) -> None:
        """Send all records that there are, and end the run there if they are the last.

        The first failure is said, and :attr:`error` holds the newest.
        """
        try:
            if self._tracker is None:
                places = self._file.places(self._name)
                self._tracker = TRACKERS[self._name](self._run, places)
                self._records = RecordFiles(Path(self._run.directory))
            tracker = self._tracker
            received = self._file.at(self._name, tracker.place, tracker.id)
            records = (
                record
                for record in self._records.new_records()
                if record.step > received.last_steps.get(record.kind, _NONE)
            )
            while batch := list(islice(records, _MOST_AT_ONCE)):
                self._send(tracker, batch, received)
            if is_last:
                tracker.close()
                _log.info("%s: %s sent", self._name, counted(self._num_sent, "record"))
            self.error = None
        except Exception as error:  # of any package; the run goes on
            self._tracker, self.error = None, error
            if not self._has_failed:
                self._has_failed = True
                _log.warning(
                    "warning: %s does not receive the run: %s; sppo track %s --to %s sends later "
                    "what is missing",
                    *(self._name, first_line(error), self._run.directory, self._name),
                )

    def _send(self, tracker: Tracker, batch: Sequence[Record], received: Received) -> None:
        """Mark records as sent, and send them; take the marks back if that fails."""
        before = dict(received.last_steps)
        received.last_steps |= {record.kind: record.step for record in batch}
        self._file.write()
        try:
            tracker.send(batch)
        except BaseException:
            received.last_steps = before
            self._file.write()
            raise
        self._num_sent += len(batch)
