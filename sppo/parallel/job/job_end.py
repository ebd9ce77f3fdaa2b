"""End of a job: the ends of its ranks, the rank to blame, and what users are told."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sppo.parallel.job.failure_report import (
    RankEnd,
    exit_code,
    failure_report,
    first_failure,
    unanswering,
    was_said_by_rank_0,
)
from sppo.parallel.job.signals import STOP_CODES


@dataclass(frozen=True, slots=True)
class JobEnd:
    """End of a job whose ranks have all ended.

    Attributes:
        ends: Ends of all ranks.
        started_s: When the first rank was started, on the clock of ``time.monotonic``.
        asked: Names of the signals by which the user asked the job to end.
        dumps: Dumps of NCCL's flight recorder.
    """

    ends: tuple[RankEnd, ...]
    started_s: float
    asked: tuple[str, ...] = ()
    dumps: tuple[Path, ...] = ()

    @property
    def blamed(self) -> RankEnd:
        """End of the rank to blame for a failure: it hung, or failed first."""
        return unanswering(self.ends) or self._first

    @property
    def exit_code(self) -> int:
        """Exit code of the job.

        0 if all ranks succeeded; else the exit code of the rank that failed first, 1 if a signal
        killed that rank, or 128 + the signal's number if a signal asked the launcher to end.
        """
        first = first_failure(self.ends)
        return 0 if first is None else exit_code(first, asked=self.asked)

    @property
    def is_failure(self) -> bool:
        """True unless all ranks ended well, or because of a signal that asked them to."""
        return not {end.returncode for end in self.ends} <= {0, *STOP_CODES}

    @property
    def report(self) -> str:
        """Text of the report of a failure, with the rank to blame first."""
        return failure_report(self.ends, first=self._first, asked=self.asked, dumps=self.dumps)

    def tell(self) -> None:
        """Print the report of a failure on stderr, unless rank 0 has said why all ranks ended."""
        if self.exit_code != 0 and not was_said_by_rank_0(self.ends):
            print(self.report, file=sys.stderr, flush=True)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part of a job that failed, in their order.

        The parts of its start, as rank 0 recorded them (:meth:`RankProgress.reached`), and from the
        fault on: until this process noticed a failed rank, and until all ranks had ended.
        """
        note, noticed_s = self.ends[0].note, min(end.ended_s for end in self.ends if end.returncode)
        reached = [("", self.started_s), *({} if note is None else note.reached_s).items()]
        parts = {name: at_s - before_s for (_, before_s), (name, at_s) in pairwise(reached)}
        parts["noticed"] = max(0.0, noticed_s - self.blamed.failed_s)
        parts["ended"] = max(end.ended_s for end in self.ends) - noticed_s
        return {name: round(seconds, 3) for name, seconds in parts.items()}

    @property
    def _first(self) -> RankEnd:
        first = first_failure(self.ends)
        assert first is not None, "the job failed"
        return first
