"""Conversion of the arguments of ``sppo simulate`` into schedules with costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sppo.api import steps_to_simulate
from sppo.cli.arguments.planned_run import load_planned_run
from sppo.config import RunConfig
from sppo.config.key_values import read_keys
from sppo.config.problems import KEY_PATHS, nearest
from sppo.config.text_file import read_text_file
from sppo.planning.plan import ExecutionPlan, read_plan
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
        devices: Devices that real costs are for; None with abstract costs, in the user's units.
    """

    cases: tuple[Case, ...]
    forward: Case
    devices: SimulatedDevices | None = None


@dataclass(frozen=True, slots=True)
class SimulatedDevices:
    """Devices that a run or a plan is simulated for.

    Attributes:
        hardware: Name of the machine and the provenance of its figures.
        num_devices: Devices of all replicas and sequence-parallel groups.
        steady_bytes: Memory of one device of each rank that no action changes: states, working set,
            room for copies and messages. Empty if only forwards are simulated.
        host_peak_bytes: Peak host memory of the device that uses most of it; None if only forwards
            are simulated.
        node_host_bytes: Peak host memory of all devices of one node together; 0 on a CPU, None if
            only forwards are simulated.
        chosen: Keys that the run leaves out and the solver chose.
    """

    hardware: str
    num_devices: int
    steady_bytes: tuple[int, ...]
    host_peak_bytes: int | None
    node_host_bytes: int | None
    chosen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Words:
    """Positional arguments of ``sppo simulate``, sorted by kind.

    Attributes:
        file: Run file or plan; None for an abstract case or a program.
        values: ``KEY=VALUE`` words.
        names: Names of schedules to compare with.
    """

    file: Path | None
    values: tuple[str, ...]
    names: tuple[str, ...]


def sort_words(words: Sequence[str]) -> Words:
    """Sort positional arguments into a run file or plan, values, and names of schedules.

    Raises:
        ValueError: Two files, or a word of no known kind.
    """
    files, values, names = [], [], []
    for word in words:
        if word in schedule_names():
            names.append(word)
        elif word.partition("=")[0].replace(".", "_").isidentifier() and "=" in word:
            values.append(word)
        elif word.endswith((*_RUN_FILES, _PLAN)):
            files.append(Path(word))
        else:
            raise ValueError(
                f"{quoted(word)} is neither a run file (.yaml) nor a plan (.json), neither "
                f"KEY=VALUE nor a schedule to compare with: {', '.join(schedule_names())}"
            )
    if len(files) > 1:
        raise ValueError(f"two files, {files[0]} and {files[1]}: simulate one at a time")
    return Words(files[0] if files else None, tuple(values), tuple(names))


def read_request(
    words: Words, *, program: Path | None, compare: Sequence[str], forward_only: bool
) -> Simulation:
    """Return the requested simulation.

    Args:
        words: Positional arguments.
        program: File of a program written by hand.
        compare: Names of schedules to compare with, some of them with commas between.
        forward_only: Whether the first case is an evaluation.

    Raises:
        ValueError: Arguments contradict each other or are missing; the message says what to write.
    """
    names = [name for given in compare for name in given.split(",") if name]
    _check_schedules(names)
    names += words.names
    if program is not None:
        if words.file or names:
            raise ValueError(
                "--program simulates the file alone: leave out the run file and --compare"
            )
        found = _program(program, words.values)
    elif words.file is None:
        found = _abstract(words.values, names=names)
    else:
        _refuse_abstract_keys(words.file, words.values)
        if words.file.suffix == _PLAN:
            found = _plan(words.file, words.values, names=names)
        else:
            found = _run(words.file, words.values, names=names)
    return _forward_alone(found) if forward_only else found


def _check_schedules(names: Sequence[str]) -> None:
    """Raise ValueError if a name is not the name of a schedule."""
    for name in names:
        if name not in schedule_names():
            raise ValueError(
                f"--compare {quoted(name)}: not one of {', '.join(schedule_names())}."
                f"{nearest(name, schedule_names())}"
            )


def _forward_alone(found: Simulation) -> Simulation:
    """Return the simulation with an evaluation as first case, whose memory no step fills."""
    devices = found.devices
    if devices is not None:
        devices = replace(devices, steady_bytes=(), host_peak_bytes=None, node_host_bytes=None)
    return Simulation((found.forward, *found.cases[1:]), found.forward, devices)


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
    text = read_text_file(file, most_bytes=_MOST_PROGRAM_BYTES)
    program = parse_program(text, source=source)
    check_program(program, source=source)
    schedule = program.schedule
    costs = case_costs(given, num_stages=schedule.num_stages, lengths=schedule.lengths)
    return Simulation((Case(schedule, costs),), Case(forward_part(schedule), costs))


def _run(file: Path, overrides: Sequence[str], *, names: Sequence[str]) -> Simulation:
    return _simulation(load_planned_run(file, overrides), names=names)


def _plan(file: Path, overrides: Sequence[str], *, names: Sequence[str]) -> Simulation:
    """Return the simulation of a plan, also under other schedules; all else in it is fixed."""
    if overrides:
        raise ValueError(
            f"{quoted(overrides[0])}: a plan has fixed it; make another plan with sppo solve, or "
            "simulate the RUN.yaml"
        )
    return _simulation(read_plan(file), names=names)


def _refuse_abstract_keys(file: Path, values: Sequence[str]) -> None:
    """Raise ValueError if a word gives a key of an abstract case, which no run file has."""
    for word in values:
        key = word.partition("=")[0]
        if key in AbstractCase.model_fields:
            paths = KEY_PATHS.get(key, ())
            here = f"; the key of a run file is {' or '.join(paths)}" if paths else ""
            raise ValueError(
                f"{quoted(word)} belongs to an abstract case, but {file} has costs of a machine: "
                f"leave out one of them{here}"
            )


def _simulation(what: RunConfig | ExecutionPlan, *, names: Sequence[str]) -> Simulation:
    steps, chosen = steps_to_simulate(what, schedules=names)
    first = steps[0]
    devices = SimulatedDevices(
        first.hardware.name_and_origin,
        first.num_devices,
        first.steady_bytes,
        first.host_peak_bytes,
        first.node_host_bytes,
        chosen,
    )
    return Simulation(tuple(step.case for step in steps), first.forward, devices)
