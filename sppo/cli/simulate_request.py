"""Conversion of the arguments of ``sppo simulate`` into schedules with costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sppo.api import steps_to_simulate
from sppo.cli.arguments import load_planned_run
from sppo.config.key_values import read_keys
from sppo.config.problems import KEY_PATHS, nearest
from sppo.config.text_file import read_text_file
from sppo.planning.plan import read_plan
from sppo.planning.simulated_run import SimulatedRun
from sppo.quoting import quoted
from sppo.schedule.abstract import (
    AbstractCase,
    AbstractCosts,
    abstract_case,
    case_costs,
    compared_case,
    forward_case,
)
from sppo.schedule.orders.names import schedule_names
from sppo.schedule.program import Case, forward_part
from sppo.schedule.program_text import check_program, parse_program

_MOST_PROGRAM_BYTES = 64 << 20
_RUN_FILES = (".yaml", ".yml")
_PLAN = ".json"


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """Schedules with costs to simulate.

    Attributes:
        cases: The requested schedule, then the schedules to compare with.
        forward: Forward part alone of the first case.
        run: Step of a run or a plan, which is the first case; None with abstract costs, in the
            user's units.
        chosen: Keys that the run leaves out and the solver chose.
    """

    cases: tuple[Case, ...]
    forward: Case
    run: SimulatedRun | None = None
    chosen: tuple[str, ...] = ()


class Words(NamedTuple):
    """Positional arguments of ``sppo simulate``, sorted by kind."""

    file: Path | None
    """Run file or plan; None for an abstract case or a program."""
    values: list[str]
    """``KEY=VALUE`` words."""
    names: list[str]
    """Names of schedules to compare with."""


def sort_words(words: Sequence[str]) -> Words:
    """Sort positional arguments into a run file or plan, values, and names of schedules.

    Raises:
        ValueError: Two files, or a word of no known kind.
    """
    file, values, names = None, [], []
    for word in words:
        if word in schedule_names():
            names.append(word)
        elif word.partition("=")[0].replace(".", "_").isidentifier() and "=" in word:
            values.append(word)
        elif not word.endswith((*_RUN_FILES, _PLAN)):
            raise ValueError(
                f"{quoted(word)} is neither a run file (.yaml) nor a plan (.json), neither "
                f"KEY=VALUE nor a schedule to compare with: {', '.join(schedule_names())}"
            )
        elif file is not None:
            raise ValueError(f"two files, {file} and {Path(word)}: simulate one at a time")
        else:
            file = Path(word)
    return Words(file, values, names)


def read_request(words: Words, *, program: Path | None, compare: Sequence[str]) -> Simulation:
    """Return the requested simulation.

    Args:
        words: Positional arguments.
        program: File of a program written by hand.
        compare: Names of schedules to compare with, some of them with commas between.

    Raises:
        ValueError: Arguments contradict each other or are missing; the message says what to write.
    """
    names = [name for given in compare for name in given.split(",") if name]
    for name in names:
        if name not in schedule_names():
            raise ValueError(
                f"--compare {quoted(name)}: not one of {', '.join(schedule_names())}."
                f"{nearest(name, schedule_names())}"
            )
    names += words.names
    if program is not None:
        if words.file or names:
            raise ValueError(
                "--program simulates the file alone: leave out the run file and --compare"
            )
        return _program(program, words.values)
    if words.file is None:
        return _abstract(words.values, names=names)
    return _step(words.file, words.values, names=names)


def _abstract(values: Sequence[str], *, names: Sequence[str]) -> Simulation:
    if not values:
        raise ValueError(
            "nothing to simulate: give RUN.yaml or plan.json, or schedule=NAME ranks=P "
            "sequences=M subsequences=N, or --program FILE"
        )
    for word in values:
        if "." in word.partition("=")[0]:
            raise ValueError(f"{quoted(word)} changes a run file, but none is given")
    request = read_keys(AbstractCase, values)
    others = (compared_case(request, name=name) for name in names)
    return Simulation((abstract_case(request), *others), forward_case(request))


def _program(file: Path, values: Sequence[str]) -> Simulation:
    given = read_keys(AbstractCosts, values, defaults={"offload_ratio": "full"})
    source = str(file)
    program = parse_program(read_text_file(file, most_bytes=_MOST_PROGRAM_BYTES), source=source)
    check_program(program, source=source)
    schedule = program.schedule
    costs = case_costs(given, num_stages=schedule.num_stages, lengths=schedule.lengths)
    return Simulation((Case(schedule, costs),), Case(forward_part(schedule), costs))


def _step(file: Path, values: Sequence[str], *, names: Sequence[str]) -> Simulation:
    """Return the simulation of a step of a run or a plan, also under other schedules."""
    for word in values:
        key = word.partition("=")[0]
        if key in AbstractCase.model_fields:
            paths = KEY_PATHS.get(key, ())
            here = f"; the key of a run file is {' or '.join(paths)}" if paths else ""
            raise ValueError(
                f"{quoted(word)} belongs to an abstract case, but {file} has costs of a machine: "
                f"leave out one of them{here}"
            )
    is_plan = file.suffix == _PLAN
    if is_plan and values:
        raise ValueError(
            f"{quoted(values[0])}: a plan has fixed it; make another plan with sppo solve, or "
            "simulate the RUN.yaml"
        )
    step = read_plan(file) if is_plan else load_planned_run(file, values)
    steps, chosen = steps_to_simulate(step, schedules=names)
    return Simulation(tuple(step.case for step in steps), steps[0].forward, steps[0], chosen)
