"""Violations of a schedule: the rule, the action and its position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sppo.quoting import quoted

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Violation:
    """Violation of one rule.

    Attributes:
        rule: Name of the rule, as listed in `validate`.
        text: Offending action and what is wrong with it.
        rank: Rank of the offending program; None if an action is missing everywhere.
        index: Position of the action in that program, from 0.
    """

    rule: str
    text: str
    rank: int | None = None
    index: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}, "
        if self.index is not None:
            where += f"action {self.index + 1}: "
        return f"{where}{self.text} (rule: {self.rule})"


class ScheduleError(RuntimeError):
    """Error of a schedule that breaks rules; the message lists the first violations.

    No request causes it, but a bug of what made the programs.
    """

    def __init__(self, name: str, *, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        shown = "\n".join(f"  {violation}" for violation in self.violations[:_SHOWN])
        hidden = len(self.violations) - _SHOWN
        more = f"\n  and {hidden} more" if hidden > 0 else ""
        super().__init__(f"schedule {quoted(name)} is not valid:\n{shown}{more}")
