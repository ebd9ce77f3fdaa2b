"""Conversion of the arguments of ``sppo simulate`` into schedules with costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sppo.quoting import quoted

if TYPE_CHECKING:
    from sppo.planning.simulated_run import SimulatedRun
    from sppo.schedule.abstract import AbstractCase, AbstractOffload, OffloadRatios
    from sppo.schedule.program import Case

Number = TypeVar("Number", int, float)

_MOST_PROGRAM_BYTES = 64 << 20
RUN_FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Flags:
    """Options as given; None where left out, so that options that do not apply can be refused."""

    schedule: str | None = None
    program: Path | None = None
    ranks: int | None = None
    virtual: int | None = None
    sequences: int | None = None
    subsequences: int | None = None
    hop: int | None = None
    forward_only: bool = False
    forward: float | None = None
    backward: float | None = None
    weight: float | None = None
    unit_costs: str | None = None
    unit_sizes: str | None = None
    latency: float | None = None
    bandwidth: float | None = None
    message_size: float | None = None
    weight_size: float | None = None
    kv_size: float | None = None
    offload_ratio: str | None = None
    d2h: float | None = None
    h2d: float | None = None
    keep_last: int | None = None
    prefetch: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """Schedules with costs to simulate.

    Attributes:
        cases: The requested schedule, then the schedules to compare with.
        forward: Forward part alone of the first case; None if its makespan is not reported.
        is_abstract: Whether times and sizes are in units that the user chose.
        devices: Devices that real costs are for; None with abstract costs.
    """

    cases: tuple[Case, ...]
    forward: Case | None
    is_abstract: bool
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
class Targets:
    """Positional arguments of ``sppo simulate``, sorted by kind."""

    run_file: Path | None
    overrides: tuple[str, ...]
    names: tuple[str, ...]


_ABSTRACT_ONLY = (
    "virtual", "sequences", "hop", "forward", "backward", "weight", "unit_costs", "unit_sizes",
    "latency", "bandwidth", "message_size", "weight_size", "kv_size", "offload_ratio", "d2h",
    "h2d", "keep_last", "prefetch",
)  # fmt: skip
_SHAPE = ("schedule", "ranks", "virtual", "sequences", "subsequences", "hop")


def sort_targets(targets: Sequence[str]) -> Targets:
    """Sort positional arguments into a run file or plan, overrides, and schedule names.

    Schedule names are those to compare with, as after --compare.

    Raises:
        ValueError: Two files, or a word of no known kind.
    """
    from sppo.schedule.orders.names import schedule_names

    files, overrides, names = [], [], []
    for word in targets:
        if word in schedule_names():
            names.append(word)
        elif word.endswith(RUN_FILES):
            files.append(Path(word))
        elif "=" in word:
            overrides.append(word)
        else:
            raise ValueError(
                f"{quoted(word)} is neither a run file (.yaml) nor a plan (.json), neither "
                f"section.key=value nor a schedule to compare with: {', '.join(schedule_names())}"
            )
    if len(files) > 1:
        raise ValueError(f"two files, {files[0]} and {files[1]}: simulate one at a time")
    return Targets(files[0] if files else None, tuple(overrides), tuple(names))


def read_request(targets: Targets, *, flags: Flags, compare: Sequence[str]) -> Simulation:
    """Return the requested simulation.

    Raises:
        ValueError: Flags contradict each other or are missing; the message says what to write.
    """
    names = [name for given in compare for name in given.split(",") if name]
    _check_schedules("--compare", names)
    _check_schedules("--schedule", [flags.schedule] if flags.schedule is not None else [])
    names += targets.names
    if flags.program is not None:
        if targets.run_file or names:
            raise ValueError(
                "--program simulates the file alone: leave out the run file and --compare"
            )
        return _program(flags)
    if targets.run_file and targets.run_file.suffix == ".json":
        return _plan(targets, flags=flags, names=names)
    if targets.run_file:
        return _run(targets, flags=flags, names=names)
    if flags.schedule is None:
        raise ValueError(
            "nothing to simulate: give RUN.yaml or plan.json, or --schedule NAME --ranks P "
            "--sequences M --subsequences N, or --program FILE"
        )
    if targets.overrides:
        raise ValueError(f"{quoted(targets.overrides[0])} changes a run file, but none is given")
    return _abstract(flags, names=names)


def _check_schedules(option: str, names: Sequence[str]) -> None:
    """Raise ValueError if a name is not the name of a schedule."""
    from sppo.config.problems import nearest
    from sppo.schedule.orders.names import schedule_names

    for name in names:
        if name not in schedule_names():
            raise ValueError(
                f"{option} {quoted(name)}: not one of {', '.join(schedule_names())}."
                f"{nearest(name, schedule_names())}"
            )


def _abstract(flags: Flags, *, names: Sequence[str]) -> Simulation:
    from sppo.schedule.abstract import abstract_case, compared_case, forward_case

    missing = [
        name for name in ("ranks", "sequences", "subsequences") if getattr(flags, name) is None
    ]
    if missing:
        wanted = ", ".join(f"--{name}" for name in missing)
        raise ValueError(f"--schedule {flags.schedule} needs {wanted} as well")
    request = _request(flags)
    forward = forward_case(request)
    first = forward if flags.forward_only else abstract_case(request)
    others = tuple(compared_case(request, name=name) for name in names)
    return Simulation((first, *others), forward, is_abstract=True)


def _program(flags: Flags) -> Simulation:
    from dataclasses import replace

    from sppo.config.text_file import read_text_file
    from sppo.schedule.abstract import case_costs
    from sppo.schedule.program import Case, forward_part
    from sppo.schedule.program_text import check_program, parse_program

    assert flags.program is not None, "only called for a program file"
    unused = [name for name in _SHAPE if getattr(flags, name) is not None]
    if unused or flags.forward_only:
        name = unused[0] if unused else "forward_only"
        raise ValueError(
            f"--{name.replace('_', '-')} is the file's to say: leave it out with --program"
        )
    source = str(flags.program)
    text = read_text_file(flags.program, most_bytes=_MOST_PROGRAM_BYTES)
    file = parse_program(text, source=source)
    check_program(file, source=source)
    schedule = file.schedule
    shape = replace(
        flags,
        schedule="sppo",
        ranks=schedule.num_ranks,
        sequences=schedule.num_sequences,
        subsequences=1,
        offload_ratio=flags.offload_ratio or "full",
    )
    costs = case_costs(_request(shape), num_stages=schedule.num_stages, lengths=schedule.lengths)
    case = Case(schedule, costs)
    return Simulation((case,), Case(forward_part(schedule), costs), is_abstract=True)


def _run(targets: Targets, *, flags: Flags, names: Sequence[str]) -> Simulation:
    from sppo.cli.arguments.planned_run import load_planned_run
    from sppo.data.samples.step_lengths import drawn_steps_if_there
    from sppo.hardware.run_hardware import run_hardware
    from sppo.planning.chosen_run import ChosenRun, with_chosen_degrees
    from sppo.planning.elastic.longest_samples import run_of_longest_samples
    from sppo.planning.simulated_run import RunShape, simulated_run

    _refuse_abstract_costs(targets, flags)
    assert targets.run_file is not None, "only called for a run file"
    run = load_planned_run(targets.run_file, targets.overrides)
    if flags.ranks is not None:
        degree = {"pipeline_parallel_degree": flags.ranks}
        run = run.model_copy(update={"parallel": run.parallel.model_copy(update=degree)})
    shapes = [RunShape(name, flags.subsequences) for name in (flags.schedule, *names)]
    hardware = run_hardware(run)
    # With --ranks the run is simulated as it stands: the solver chooses no degrees.
    whole = (
        ChosenRun(run_of_longest_samples(run))
        if flags.ranks
        else with_chosen_degrees(run, hardware=hardware, draw=drawn_steps_if_there)
    )
    return _simulation(
        [simulated_run(whole.run, hardware=hardware, shape=shape) for shape in shapes],
        flags,
        chosen=whole.chosen,
    )


def _plan(targets: Targets, *, flags: Flags, names: Sequence[str]) -> Simulation:
    """Return the simulation of a plan under its own schedule or the requested one.

    Everything else in the plan is fixed.
    """
    from dataclasses import replace

    from sppo.planning.plan import read_plan
    from sppo.planning.simulated_run import simulated_plan

    _refuse_abstract_costs(targets, flags)
    assert targets.run_file is not None, "only called for a plan"
    fixed = [f"--{name}" for name in ("ranks", "subsequences") if getattr(flags, name) is not None]
    fixed += targets.overrides
    if fixed:
        raise ValueError(
            f"{fixed[0]}: a plan has fixed it; make another plan with sppo solve, or simulate the "
            "RUN.yaml"
        )
    plan = read_plan(targets.run_file)
    schedules = [flags.schedule or plan.schedule, *names]
    return _simulation([simulated_plan(replace(plan, schedule=name)) for name in schedules], flags)


def _refuse_abstract_costs(targets: Targets, flags: Flags) -> None:
    wrong = [name for name in _ABSTRACT_ONLY if getattr(flags, name) is not None]
    if wrong:
        raise ValueError(
            f"--{wrong[0].replace('_', '-')} sets an abstract cost, but {targets.run_file} has "
            "real ones: leave it out, or simulate --schedule NAME without a run file"
        )


def _simulation(
    runs: Sequence[SimulatedRun], flags: Flags, *, chosen: tuple[str, ...] = ()
) -> Simulation:
    first = runs[0].forward if flags.forward_only else runs[0].case
    hardware = runs[0].hardware
    return Simulation(
        (first, *(other.case for other in runs[1:])),
        runs[0].forward,
        is_abstract=False,
        devices=SimulatedDevices(
            hardware.name_and_origin,
            runs[0].num_devices,
            () if flags.forward_only else runs[0].steady_bytes,
            None if flags.forward_only else runs[0].host_peak_bytes,
            None if flags.forward_only else runs[0].node_host_bytes,
            chosen,
        ),
    )


def _request(flags: Flags) -> AbstractCase:
    from sppo.schedule.abstract import AbstractCase

    assert flags.schedule is not None, "a schedule has been checked for"
    return AbstractCase(
        schedule=flags.schedule,
        num_ranks=flags.ranks or 0,
        num_sequences=flags.sequences or 0,
        num_subsequences=flags.subsequences or 0,
        num_virtual=_or(flags.virtual, 1),
        warmup_per_hop=_or(flags.hop, 1),
        forward_s=_or(flags.forward, 1.0),
        backward_s=_or(flags.backward, 2.0),
        weight_s=_or(flags.weight, 0.0),
        unit_costs=_numbers(flags.unit_costs, option="--unit-costs") or (1.0,),
        unit_sizes=_numbers(flags.unit_sizes, option="--unit-sizes") or (1.0,),
        latency_s=_or(flags.latency, 0.0),
        bytes_per_s=_or(flags.bandwidth, math.inf),
        message_bytes=_or(flags.message_size, 0.0),
        weight_bytes=_or(flags.weight_size, 0.0),
        kv_bytes=_or(flags.kv_size, 0.0),
        offload=_offload(flags),
    )


def _offload(flags: Flags) -> AbstractOffload:
    from sppo.schedule.abstract import AbstractOffload

    ratios: OffloadRatios
    if flags.offload_ratio is None or flags.offload_ratio == "none":
        ratios = "none"
    elif flags.offload_ratio == "full":
        ratios = "full"
    elif flags.offload_ratio == "adaptive":
        ratios = "adaptive"
    else:
        ratios = _numbers(flags.offload_ratio, option="--offload-ratio")
    return AbstractOffload(
        ratios=ratios,
        d2h_s=_or(flags.d2h, 1.0),
        h2d_s=_or(flags.h2d, 1.0),
        keep_last=flags.keep_last,
        prefetch=_or(flags.prefetch, 1),
    )


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _numbers(text: str | None, *, option: str) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(
            f"{option} {quoted(text)}: write numbers with commas between them, as in 1,2,1"
        ) from None
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise ValueError(f"{option} {quoted(text)}: every number must be finite and at least 0")
    return values
