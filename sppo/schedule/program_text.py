"""Program text: schedules as text files that people write and read.

    # Two ranks, one sequence in two subsequences.
    name by-hand
    ranks 2
    lengths 16,16
    rank 0: 0F0.0 0F0.1 0B0.1 0B0.0
    rank 1: 1F0.0 1F0.1 1B0.1 1B0.0

One line per rank; an action is spelled as in `actions` (`0F2.1`, `0F2.1[1/3]`, `0SEND_ACT2.1`,
`0D2H2.1`, `0D2H_KV2.1`, `0REDUCE`, `0H2D_WEIGHTS`). Stage s is on rank s mod P of P ranks. `#`
starts a comment. All lines above the programs are optional:

* `name TEXT`: name that plots show.
* `ranks P`: number of ranks, so that a file that was cut short is refused. Default: as many as
  there are programs.
* `virtual V`, `style loop`: number of stages per rank, and how stages are placed. They are written
  for people and not read, because the programs say so themselves.
* `lengths 16,16`: tokens of each subsequence of one sequence, one line per sequence, in order.
  Default: as many sequences and subsequences as the actions name, of 1 token each.
* `cut 0 2.1 = 5,6,5`: tokens of the shards of unit 2.1 on stage 0.
* `rank R:` before a program; without it the lines belong to ranks 0, 1, 2 and so on.

A file holds at most a million actions. Each rank needs one program and each unit on each stage at
least one action, so a file of a few lines cannot describe a large schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from sppo.quoting import quoted
from sppo.schedule.actions import OPCODES, Action, Cut, Lengths, Op, Placement
from sppo.schedule.checks import find_violations
from sppo.schedule.schedule import MalformedActionError, Schedule

_KINDS = {str(Action(kind, 0, wire=wire)).removeprefix("0"): (kind, wire) for kind, wire in OPCODES}
"""Kinds of actions and what they carry, as they are spelled."""
_ACTION = re.compile(
    rf"(?P<stage>[0-9]{{1,9}})(?P<kind>{'|'.join(sorted(_KINDS, key=len, reverse=True))})"
    r"(?:(?P<sequence>[0-9]{1,9})\.(?P<subsequence>[0-9]{1,9})"
    r"(?:\[(?P<shard>[0-9]{1,9})/(?P<num_shards>[0-9]{1,9})\])?)?"
)
_RANK = re.compile(r"rank\s+([0-9]+)\s*:\s*(.*)")
_CUT = re.compile(r"([0-9]{1,9})\s+([0-9]{1,9})\.([0-9]{1,9})\s*=\s*([0-9,\s]+)")

MOST_ACTIONS = 1_000_000
"""Upper bound on the actions of one file; simulating that many takes minutes."""
_FOR_PEOPLE = ("virtual", "style")
_SHOWN = 5
_MOST_DIGITS = 12
"""Upper bound on the digits of a number in a file: a trillion tokens."""


class ProgramTextError(ValueError):
    """Error of a program file that cannot be read or breaks a rule; the message names the lines."""


def parse_action(text: str) -> Action:
    """Return the action spelled `text`.

    Raises:
        ValueError: Text that is not an action; the message shows how to spell one.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{quoted(text)} is not an action: write stage, kind, sequence.subsequence, as in "
            "0F2.1, 1B0.3, 0SEND_ACT2.1, 0D2H2.1 or 0F2.1[1/3], or 0REDUCE"
        )
    kind, carries = _KINDS[match["kind"]]
    of_stage = OPCODES[kind, carries] >= Op.REDUCE
    if (match["sequence"] is None) != of_stage:
        rule = "names only a stage" if of_stage else "names its unit"
        raise ValueError(
            f"{quoted(text)} is not an action: {match['kind']} {rule}, as in 0REDUCE or 0F2.1"
        )
    stage = int(match["stage"])
    if of_stage:
        return Action(kind, stage, wire=carries)
    shard, num_shards = int(match["shard"] or 0), int(match["num_shards"] or 1)
    unit = int(match["sequence"]), int(match["subsequence"])
    return Action(kind, stage, *unit, carries, shard, num_shards)


def format_program(schedule: Schedule) -> str:
    """Return the text of `schedule`, which `parse_program` reads back."""
    placement = schedule.placement
    lines = [f"name {schedule.name}", f"ranks {placement.num_ranks}"]
    if placement.num_virtual > 1:
        lines += [f"virtual {placement.num_virtual}", "style loop"]
    lines += [f"lengths {_numbers(parts)}" for parts in schedule.lengths]
    lines += [
        f"cut {cut.stage} {cut.sequence}.{cut.subsequence} = {_numbers(cut.lengths)}"
        for cut in schedule.cuts
    ]
    for rank, program in enumerate(schedule.programs):
        lines.append(f"rank {rank}: {' '.join(map(str, program))}".rstrip())
    return "\n".join(lines) + "\n"


def parse_program(text: str, *, source: str = "program") -> Schedule:
    """Return the schedule that a file describes.

    Args:
        text: Content of the file.
        source: Name of the file in error messages.

    Raises:
        ProgramTextError: A line that cannot be read, or a schedule that breaks rules; the message
            gives the number of the line and what is expected, or the actions and the rules.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        try:
            reader.read(content, number=number)
        except ValueError as error:
            raise ProgramTextError(f"{source}, line {number}: {error}") from error
    try:
        schedule = reader.finish()
    except MalformedActionError as error:
        number = reader.lines[error.rank]
        raise ProgramTextError(f"{source}, line {number}: {error}") from error
    except ValueError as error:
        raise ProgramTextError(f"{source}: {error}") from error
    problems = [
        f"  {source}, line {reader.lines[found.rank]}: {found}"
        if found.rank is not None
        else f"  {source}: {found}"
        for found in find_violations(schedule)[:_SHOWN]
    ]
    if problems:
        shown = "\n".join(problems)
        raise ProgramTextError(f"{quoted(schedule.name)} is not a valid schedule:\n{shown}")
    return schedule


def _numbers(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


class _Reader:
    """Parser of a program file, with what it has read so far."""

    def __init__(self) -> None:
        self.name = "program"
        self.ranks: int | None = None
        self.lengths: list[tuple[int, ...]] = []
        self.cuts: list[Cut] = []
        self.programs: dict[int, tuple[Action, ...]] = {}
        self.lines: dict[int, int] = {}
        self.num_actions = 0

    def read(self, content: str, *, number: int) -> None:
        """Parse one line, given without its comment."""
        key, _, value = content.partition(" ")
        ranked = _RANK.fullmatch(content)
        if ranked or content[0].isdigit():
            rank = _whole(ranked[1]) if ranked else len(self.programs)
            if rank in self.programs:
                raise ValueError(f"rank {rank} has a program on line {self.lines[rank]} already")
            spelled = (ranked[2] if ranked else content).split()
            self.num_actions += len(spelled)
            if self.num_actions > MOST_ACTIONS:
                raise ValueError(f"more than {MOST_ACTIONS:,} actions; take fewer units or stages")
            self.programs[rank] = tuple(map(parse_action, spelled))
            self.lines[rank] = number
        elif key == "name":
            self.name = value.strip()
        elif key == "ranks":
            self.ranks = _at_least_one(key, value)
        elif key == "lengths":
            self.lengths.append(tuple(_at_least_one(key, word) for word in value.split(",")))
        elif key == "cut":
            match = _CUT.fullmatch(value.strip())
            if match is None:
                raise ValueError(
                    f"cut {quoted(value)}: write stage, unit and tokens: cut 0 2.1 = 5,6,5"
                )
            parts = tuple(map(_whole, match[4].split(",")))
            self.cuts.append(Cut(int(match[1]), int(match[2]), int(match[3]), parts))
        elif key not in _FOR_PEOPLE:
            raise ValueError(
                f"{quoted(key)} starts no line: write name, ranks, virtual, style, lengths, cut, "
                "or a program such as 'rank 0: 0F0.0 0B0.0'"
            )

    def finish(self) -> Schedule:
        """Return the schedule, with defaults for everything that the file leaves out."""
        if not self.programs:
            raise ValueError("holds no program: write one line per rank, 'rank 0: 0F0.0 0B0.0'")
        actions = [action for program in self.programs.values() for action in program]
        last = max(self.programs)
        ranks = last + 1 if self.ranks is None else self.ranks
        if not len(self.programs) == last + 1 == ranks:
            raise ValueError(
                f"programs for {len(self.programs)} of {ranks} ranks, the last for rank "
                f"{last}: write one line for each of the ranks 0 to {ranks - 1}"
            )
        virtual = max((action.stage for action in actions), default=0) // ranks + 1
        lengths = tuple(self.lengths) or _named_lengths(actions)
        units = sum(map(len, lengths))
        if units * ranks * virtual > max(len(actions), ranks):
            raise ValueError(
                f"{units} subsequences on {ranks} ranks with {virtual} stages each, and only "
                f"{len(actions)} actions: every subsequence needs one on every stage"
            )
        programs = tuple(self.programs[rank] for rank in range(ranks))
        cuts, placement = tuple(sorted(self.cuts)), Placement(ranks, virtual)
        schedule = Schedule.of_actions(self.name, placement, lengths, programs, cuts)
        for stage, sequence, subsequence, _ in cuts:
            if stage >= schedule.num_stages or (sequence, subsequence) not in schedule.keys:
                raise ValueError(f"cut {stage} {sequence}.{subsequence}: there is no such unit")
        return schedule


def _whole(text: str) -> int:
    word = text.strip()
    if not (word.isascii() and word.isdecimal()):
        raise ValueError(f"{quoted(word)} is not a whole number")
    if len(word) > _MOST_DIGITS:
        raise ValueError(f"{quoted(word)} is too large; write at most {_MOST_DIGITS} digits")
    return int(word)


def _at_least_one(key: str, text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise ValueError(f"{key} {number}: must be at least 1")
    return number


def _named_lengths(actions: Sequence[Action]) -> Lengths:
    """Return one token for every subsequence up to the last one that any action names."""
    counts: dict[int, int] = {}
    for action in actions:
        if action.sequence is not None and action.subsequence is not None:
            counts[action.sequence] = max(counts.get(action.sequence, 0), action.subsequence + 1)
    num_sequences = max(counts, default=0) + 1
    if max(num_sequences, *counts.values(), 1) > len(actions):
        raise ValueError("an action names a unit, but not every unit before it has one")
    return tuple((1,) * counts.get(sequence, 1) for sequence in range(num_sequences))
