"""Rejected candidates in words, grouped by the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sppo.cost.memory.bucket_labels import bucket_text
from sppo.planning.search.division import Rejection
from sppo.units import format_bytes


@dataclass(frozen=True, slots=True)
class RejectedGroup:
    """Rejected candidates with the same reason.

    Attributes:
        count: Number of candidates.
        reason: Common part of the reasons. For a single candidate that cannot work in any memory,
            the candidate and its reason.
        example: Description of the candidate that is nearest to fitting; "" if `reason` says all.
    """

    count: int
    reason: str
    example: str


def rejected_groups(rejected: Sequence[Rejection]) -> tuple[RejectedGroup, ...]:
    """Group rejections by reason: first those short of memory, then others; larger groups first."""
    by_reason: dict[tuple[bool, str], list[Rejection]] = {}
    for rejection in rejected:
        by_reason.setdefault(_reason(rejection), []).append(rejection)
    groups = sorted(by_reason.items(), key=lambda item: (item[0][0], -len(item[1]), item[0][1]))
    return tuple(_group(members, reason) for (_, reason), members in groups)


def _group(members: Sequence[Rejection], reason: str) -> RejectedGroup:
    example = _example(members)
    if members[0].shortfall is not None:
        return RejectedGroup(len(members), reason, example)
    if len(members) == 1:
        return RejectedGroup(1, example, "")
    return RejectedGroup(len(members), _in_common(members), example)


def _in_common(members: Sequence[Rejection]) -> str:
    """Return the common words of the members' reasons, with "…" for words that differ."""
    places = zip(*(_without_figures(member.reason).split() for member in members), strict=True)
    return " ".join(words[0] if len(set(words)) == 1 else "…" for words in places)


def _reason(rejection: Rejection) -> tuple[bool, str]:
    """Return whether a rejection is independent of memory, and the key to group it by."""
    shortfall = rejection.shortfall
    if shortfall is None:
        words = _without_figures(rejection.reason).split()
        return True, " ".join("…" if word.strip(",;").isdigit() else word for word in words)
    place = f"{shortfall.place} memory" if shortfall.place != "disk" else "disk space"
    return False, f"short of {place}, most of it {bucket_text(shortfall.bucket)}"


def _without_figures(reason: str) -> str:
    """Return `reason` up to the first colon, which precedes its figures."""
    return reason.partition(": ")[0]


def _example(members: Sequence[Rejection]) -> str:
    def short_bytes(rejection: Rejection) -> tuple[bool, int]:
        short = rejection.shortfall
        return (False, 0) if short is None else (short.at_least, short.short_bytes)

    nearest = min(members, key=short_bytes)
    shortfall, where = nearest.shortfall, nearest.degrees.text()
    if shortfall is None:
        return f"{where}: {nearest.reason}"
    bound = "at least " if shortfall.at_least else ""
    bounded = any(one.shortfall is not None and one.shortfall.at_least for one in members)
    return (
        f"{'e.g.' if bounded else 'nearest'} {where}, N={nearest.num_subsequences}: rank "
        f"{shortfall.rank} is short by {bound}{format_bytes(shortfall.short_bytes)} "
        f"({bucket_text(shortfall.bucket)} {format_bytes(shortfall.bucket_bytes)} of {bound}"
        f"{format_bytes(shortfall.needed_bytes)} needed, "
        f"{format_bytes(shortfall.available_bytes)} there)"
    )
