"""End of a job: the ends of its ranks, the rank to blame, and what users are told."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from sppo.parallel.job.failure_report import (
    RankEnd,
    exit_code,
    failure_report,
    first_failure,
    unanswering,
    was_said_by_rank_0,
)


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
    def blamed(self) -> RankEnd | None:
        """End of the rank to blame: it hung, or failed first; None if all ranks succeeded."""
        return unanswering(self.ends) or first_failure(self.ends)

    @property
    def exit_code(self) -> int:
        """Exit code of the job.

        0 if all ranks succeeded; else the exit code of the rank that failed first, 1 if a signal
        killed that rank, or 128 + the signal's number if a signal asked the launcher to end.
        """
        first = first_failure(self.ends)
        return 0 if first is None else exit_code(first, asked=self.asked)

    @property
    def report(self) -> str:
        """Text of the report, with the rank to blame first; "" if all ranks succeeded."""
        first = first_failure(self.ends)
        if first is None:
            return ""
        return failure_report(self.ends, first=first, asked=self.asked, dumps=self.dumps)

    def tell(self) -> None:
        """Print the report on stderr, unless rank 0 has printed why all ranks ended."""
        if self.report and not was_said_by_rank_0(self.ends):
            print(self.report, file=sys.stderr, flush=True)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part of the job, in their order; {} of a job that succeeded.

        The parts of its start, as rank 0 recorded them (:meth:`RankProgress.reached`), and from the
        fault on: until this process noticed a failed rank, and until all ranks had ended.
        """
        if self.blamed is None:
            return {}
        note = self.ends[0].note
        parts, before_s = {}, self.started_s
        for name, reached_s in ({} if note is None else note.reached_s).items():
            parts[name], before_s = reached_s - before_s, reached_s
        noticed_s = min(end.ended_s for end in self.ends if end.returncode)
        parts["noticed"] = max(0.0, noticed_s - self.blamed.failed_s)
        parts["ended"] = max(end.ended_s for end in self.ends) - noticed_s
        return parts
