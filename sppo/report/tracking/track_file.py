"""``track.json`` of a run: what each tracker calls the run, and the last steps that it received.

A record is marked before it is sent, and the mark is taken back if sending fails. A resumed run
that repeats steps therefore sends none of them twice.
"""

from __future__ import annotations

import fcntl
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sppo.output_file import write_json

TRACK_FILE = "track.json"
_LOCK_FILE = ".track.lock"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Received:
    """Newest record of the run that one place of one tracker has received, by kind."""

    id: str
    """Id of the run there."""
    last_steps: dict[str, int] = field(default_factory=dict)
    """Step of the last record, by kind."""


_ADAPTER = TypeAdapter(dict[str, dict[str, Received]])


class TrackFile:
    """The file of one run, for the threads of the one process that sends its records."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / TRACK_FILE
        self._lock = threading.Lock()
        try:
            self._received = _ADAPTER.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            self._received = {}
        except ValidationError:
            raise ValueError(
                f"{self._path} is damaged: remove it, and the records are sent again, as a new run"
            ) from None

    def places(self, tracker: str) -> Mapping[str, Received]:
        """Return what each place of a tracker has received."""
        return self._received.get(tracker, {})

    def at(self, tracker: str, place: str, run_id: str) -> Received:
        """Return what a place has received of the run; the place is added if it is unknown."""
        places = self._received.setdefault(tracker, {})
        if place not in places:
            places[place] = Received(run_id)
            self.write()
        return places[place]

    def write(self) -> None:
        """Write the file."""
        with self._lock:
            places = {
                tracker: {place: asdict(received) for place, received in found.items()}
                for tracker, found in self._received.items()
            }
            write_json(self._path, places)


@contextmanager
def only_sender(directory: Path) -> Iterator[None]:
    """Let no other process send records of the run during the context; wait for one that does."""
    with (directory / _LOCK_FILE).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("%s: another process still sends records of this run; waiting", directory)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
