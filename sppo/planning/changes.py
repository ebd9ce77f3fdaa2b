"""Changes of a request: those that would make it fit, and those that would make it faster.

Each is one override of the run file or of the machine. The changed request is searched like the
request itself, without alternatives, and the effect is that of its best candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from sppo.config.run import HardwareConfig, RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.estimate import model_counts
from sppo.planning.longest_sequence import fits_at_all, longest_sequence
from sppo.planning.search.choices import subsequence_counts_to_try, virtual_stages_to_try
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.solver import Solution, quick_best
from sppo.units import format_bytes, format_duration, format_tokens

MachineOf = Callable[[RunConfig], HardwareSpec]
"""Function that returns the machine that the ranks of a run see, since ranks divide a CPU."""
_Request = tuple[str, RunConfig, HardwareSpec]
"""Override, changed run, and the machine that it sees."""

WORTH_IT = 1.03
"""Tokens per second and device from which a change is listed, relative to the best answer."""
_LISTED = 4
_STARVED = 0.1
"""Bubble fraction from which more sequences per step are tried."""
_MOST_UNITS = 200_000
"""Stages x units up to which more sequences per step are tried."""
_AS_FAST = 1.01
"""Step time allowed on fewer nodes, relative to the best answer."""
_NEARLY = 0.995
"""Gain from which half as many sequences per step are preferred, relative to the best gain."""
_MOST_NODES = 1024
_ROOMY_BYTES = 1 << 50
_OFFLOAD = "state.optimizer=host"
_DISK = "activations.disk=DIR"
_CHOSEN = {
    "parallel": (
        "data_parallel_degree",
        "pipeline_parallel_degree",
        "sequence_parallel_degree",
        "schedule",
        "virtual_stages",
    ),
    "sequence": ("num_subsequences", "boundaries"),
    "activations": ("policy", "offload_ratio", "kv", "tier"),
    "state": ("weights", "gradients", "optimizer"),
}
"""Keys that the solver chooses if a run file leaves them out, by section."""


@dataclass(frozen=True, eq=False)
class Change:
    """One change of a request, and its effect.

    Attributes:
        change: Change as text, such as the override to write.
        effect: Effect of the change as text; "" if the change makes a request faster.
        best: Best candidate of the changed request; None if the change shortens the sequence.
        gain: Tokens per second and device of the machine, as a multiple of those of the answer to
            the unchanged request; 1 if that does not fit.
    """

    change: str
    effect: str = ""
    best: EvaluatedCandidate | None = None
    gain: float = 1.0

    @property
    def step_s(self) -> float | None:
        """Seconds of a step after the change."""
        return None if self.best is None else self.best.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all devices after the change."""
        return None if self.best is None else self.best.tokens_per_s

    @property
    def node_host_bytes(self) -> int | None:
        """Host memory that the devices of a node use after the change."""
        return None if self.best is None else self.best.node_host_bytes

    @property
    def device_peak_bytes(self) -> int | None:
        """Peak memory of the fullest device after the change."""
        return None if self.best is None else self.best.device_peak_bytes


# What would fit.


def what_would_fit(run: RunConfig, *, machine_of: MachineOf) -> tuple[Change, ...]:
    """Return the smallest changes that make a request feasible, easiest first.

    Args:
        run: Request that does not fit.
        machine_of: Function that returns the machine that the ranks of a changed run see.
    """
    hardware = machine_of(run)
    easiest = (_first_that_fits(group) for group in _groups(run, machine_of))
    changes = [
        *(change for change in easiest if change is not None),
        *_shorter(run, hardware),
        *_more_nodes(run, machine_of),
    ]
    if all(change.change.startswith("sequence.length=") for change in changes):
        changes += _no_conditions(run, machine_of)
    return tuple(changes)


def too_long_for(run: RunConfig, *, hardware: HardwareSpec) -> str | None:
    """Return a message if K and V alone need more memory than all devices have; None otherwise.

    With several stages on each rank, the device holds the K/V gradients of one stage at a time, and
    K and V of two stages, one in use and one being copied back, unless all K and V are retained.
    """
    counts = model_counts(run)
    most = virtual_stages_to_try(run, num_ranks=1)[-1]
    stay = most == 1 or run.activations.kv == "retain"
    kv_bytes = counts.kv_bytes if stay else counts.kv_bytes * 2 // most
    needed = kv_bytes + counts.kv_gradients_bytes // most
    there = hardware.num_devices * hardware.device.usable_bytes
    if needed <= there:
        return None
    whose = "" if most == 1 else f"of one of {most} stages "
    layers = "all layers" if stay or most == 2 else f"two of {most} stages"
    count = hardware.num_devices
    devices = "the device has" if count == 1 else f"{count} devices together have"
    return (
        f"K and V of {layers} are on the devices at once, with gradients {whose}in fp32: "
        f"{format_bytes(needed)} for one sequence, and {devices} {format_bytes(there)}; no cuts, "
        "degrees or policy change that"
    )


def _groups(run: RunConfig, machine_of: MachineOf) -> Iterator[Iterable[_Request]]:
    """Yield groups of changed requests, of each of which the first that fits is advised."""
    hardware = machine_of(run)
    yield _fewer_conditions(run, machine_of)
    if run.activations.policy not in ("auto", "hybrid"):
        free = _with_keys(run, "activations", offload_ratio="auto")
        yield [
            (
                f"activations.policy={policy}",
                _with_keys(free, "activations", policy=policy),
                hardware,
            )
            for policy in ("hybrid", "keep_attention", "recompute")
        ]
    if _may_offload(run, hardware):
        yield [(_OFFLOAD, _with_keys(run, "state", optimizer="host"), hardware)]
    if hardware.node.disk_bytes and run.activations.disk is None:
        yield [(_DISK, _with_keys(run, "activations", disk="DIR"), hardware)]
    yield [
        (
            f"more {what} per node",
            run,
            replace(hardware, node=replace(hardware.node, **{name: size})),
        )
        for name, what, size in (
            ("host_memory_bytes", "host memory", _ROOMY_BYTES),
            ("disk_bytes", "disk space", _ROOMY_BYTES),
        )
        if getattr(hardware.node, name)
    ]


def _first_that_fits(requests: Iterable[_Request]) -> Change | None:
    """Return the first of some changes that makes the request fit; None if none does."""
    for override, run, hardware in requests:
        best = quick_best(run, hardware)
        if best is not None:
            return Change(override, _effect(best), best)
    return None


def _effect(best: EvaluatedCandidate) -> str:
    """Return the step time and host memory of a candidate as text."""
    text = f"{format_duration(best.step_s)} a step"
    if best.node_host_bytes:
        text += f", {format_bytes(best.node_host_bytes)} of host memory a node"
    return text


def _fewer_conditions(run: RunConfig, machine_of: MachineOf) -> Iterator[_Request]:
    """Yield the request without its cuts, without its degrees, and without both."""
    written = _written(run)
    cuts = {"sequence": written["sequence"]}
    degrees = {"parallel": [key for key in written["parallel"] if key.endswith("_degree")]}
    for left_out in (cuts, degrees, degrees | cuts):
        if all(left_out.values()):
            freed = without_keys(run, **left_out)
            yield _left_out(left_out), freed, machine_of(freed)


def _no_conditions(run: RunConfig, machine_of: MachineOf) -> Iterator[Change]:
    """Yield the change to leave out all keys that the solver can choose.

    If that alone does not fit, each change also names a shorter sequence or more nodes.
    """
    written = _written(run)
    if not any(written.values()):
        return
    freed, left_out = without_keys(run, **written), _left_out(written)
    change = _first_that_fits([(left_out, freed, machine_of(freed))])
    if change is not None:
        yield change
        return
    for other in (*_shorter(freed, machine_of(freed)), *_more_nodes(freed, machine_of)):
        yield replace(other, change=f"{other.change}, and {left_out}")


def _written(run: RunConfig) -> dict[str, list[str]]:
    """Return the keys that the run writes of those that the solver can choose, by section."""
    return {
        section: [key for key in keys if key in getattr(run, section).model_fields_set]
        for section, keys in _CHOSEN.items()
    }


def _left_out(keys: dict[str, list[str]]) -> str:
    names = [f"{section}.{key}" for section, own in keys.items() for key in own]
    return f"leave out {', '.join(names)}"


def without_keys(run: RunConfig, **left_out: list[str]) -> RunConfig:
    """Return `run` as if some keys had not been written.

    Args:
        run: Validated run configuration.
        left_out: Keys to leave out, by section.
    """
    sections = {}
    for section_name, keys in left_out.items():
        section = getattr(run, section_name)
        given = section.model_fields_set - set(keys)
        sections[section_name] = type(section)(**{key: getattr(section, key) for key in given})
    return run.model_copy(update=sections)


def _with_keys(run: RunConfig, section: str, **values: object) -> RunConfig:
    """Return `run` with other values of some keys of a section."""
    return run.model_copy(update={section: getattr(run, section).model_copy(update=values)})


def _may_offload(run: RunConfig, hardware: HardwareSpec) -> bool:
    """Return whether the run keeps optimizer states on the device, and the host may have them."""
    on_gpu = hardware.node.host_memory_bytes > 0 and hardware.device.kind != "cpu"
    return on_gpu and run.state.optimizer == "device"


def _shorter(run: RunConfig, hardware: HardwareSpec) -> Iterator[Change]:
    if run.sequence.boundaries is not None:
        return
    length = longest_sequence(run, hardware)
    if 0 < length < run.sequence.length:
        yield Change(f"sequence.length={format_tokens(length)}", "the longest that fits here")


def _more_nodes(run: RunConfig, machine_of: MachineOf) -> Iterator[Change]:
    """Yield the fewest nodes that fit, with the optimizer on the device or on the host.

    Optimizer states in host memory are advised only if fewer nodes fit with them.
    """
    hardware, nodes = machine_of(run), _fewest_nodes(run, machine_of)
    requests = [("", run, nodes)]
    if _may_offload(run, hardware):
        offloading = _with_keys(run, "state", optimizer="host")
        fewer = _fewest_nodes(offloading, machine_of)
        if fewer is not None and fewer > hardware.num_nodes and (nodes is None or fewer < nodes):
            requests.append((f" {_OFFLOAD}", offloading, fewer))
    for also, request, count in requests:
        if count is None:
            continue
        machine = _of_nodes(request, count, machine_of)
        change = _first_that_fits([(f"hardware.nodes={count}{also}", request, machine)])
        if change is not None:
            yield replace(change, effect=f"{machine.num_devices} devices, {change.effect}")


def _fewest_nodes(run: RunConfig, machine_of: MachineOf) -> int | None:
    """Return the fewest nodes of this kind on which the run fits; None if the most tried do not."""

    def fits(nodes: int) -> bool:
        return fits_at_all(run, _of_nodes(run, nodes, machine_of))

    many = machine_of(run).num_nodes
    few = many - 1
    while not fits(many):
        few, many = many, 2 * many
        if many > _MOST_NODES:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if fits(middle) else (middle, many)
    return many


def _of_nodes(run: RunConfig, nodes: int, machine_of: MachineOf) -> HardwareSpec:
    """Return the machine that the ranks of a run see on a number of nodes."""
    config = HardwareConfig() if run.hardware == "auto" else run.hardware
    config = config.model_copy(update={"nodes": nodes})
    return machine_of(run.model_copy(update={"hardware": config}))


# What would be faster.


def improvements(solution: Solution) -> tuple[Change, ...]:
    """Return the changes of a feasible request that gain most, best first.

    Args:
        solution: Answer to a request that fits.
    """
    others = (_gaining(solution, request) for request in _other_requests(solution))
    found = [*_more_sequences(solution), _fewer_nodes(solution), *others]
    gaining = [change for change in found if change is not None]
    return tuple(sorted(gaining, key=lambda change: -change.gain)[:_LISTED])


def _gaining(solution: Solution, request: _Request, *, most_s: float = math.inf) -> Change | None:
    """Return a change with its gain; None if it does not fit, or gains less than is listed.

    Args:
        solution: Answer to the request without the change.
        request: Changed request.
        most_s: Upper bound of the step time; slower steps are not wanted.
    """
    override, run, hardware = request
    rate = _best(solution).tokens_per_s / solution.hardware.num_devices
    tokens = run.sequence.length * run.train.sequences_per_step / hardware.num_devices
    most_s = min(most_s, tokens / rate / WORTH_IT)
    best = quick_best(run, hardware, below=most_s)
    if best is None or best.step_s > most_s:
        return None
    return Change(override, best=best, gain=tokens / best.step_s / rate)


def _best(solution: Solution) -> EvaluatedCandidate:
    assert solution.best is not None, "only asked of what fits"
    return solution.best


def _more_sequences(solution: Solution) -> Iterator[Change]:
    """Yield the gain of more sequences per step: the fewest whose gain is close to the best.

    Tried only if the bubble is large or devices are unused.
    """
    run, hardware, best = solution.run, solution.hardware, _best(solution)
    idle = best.degrees.num_devices < hardware.num_devices
    if best.simulated.bubble_fraction < _STARVED and not idle:
        return
    units = best.costs.forward_s.size // best.candidate.sequences
    most = min(hardware.num_devices, _MOST_UNITS // units)
    counts = [run.train.sequences_per_step]
    while 2 * counts[-1] <= most:
        counts.append(2 * counts[-1])
    fewest, most_gain = None, 0.0
    for sequences in reversed(counts[1:]):
        more = _with_keys(run, "train", sequences_per_step=sequences)
        change = _gaining(solution, (f"train.sequences_per_step={sequences}", more, hardware))
        if change is None or change.gain < _NEARLY * most_gain:
            break
        fewest, most_gain = change, max(most_gain, change.gain)
    if fewest is not None:
        yield fewest


def _fewer_nodes(solution: Solution) -> Change | None:
    """Return the gain of fewer nodes if a step takes about as long on them."""
    hardware, best = solution.hardware, _best(solution)
    used = -(-best.degrees.num_devices // hardware.node.num_devices)
    nodes = used if used < hardware.num_nodes else hardware.num_nodes // 2
    if nodes == 0:
        return None
    request = (f"hardware.nodes={nodes}", solution.run, replace(hardware, num_nodes=nodes))
    return _gaining(solution, request, most_s=best.step_s * _AS_FAST)


def _other_requests(solution: Solution) -> Iterator[_Request]:
    """Yield requests with another tier, ZeRO level, schedule, policy or cuts."""
    run, hardware = solution.run, solution.hardware
    on_host = hardware.node.host_memory_bytes > 0 and hardware.device.kind != "cpu"
    overrides: list[tuple[str, str, object]] = []
    if on_host and run.state.optimizer in ("auto", "device"):
        overrides.append(("state", "optimizer", "host"))
    overrides += [("parallel", "zero", level) for level in range(run.parallel.zero + 1, 4)]
    if run.parallel.schedule != "auto":
        overrides.append(("parallel", "schedule", "auto"))
    if run.activations.policy not in ("auto", "hybrid"):
        overrides.append(("activations", "policy", "auto"))
    if run.activations.offload_ratio != "auto":
        overrides.append(("activations", "offload_ratio", "auto"))
    for section, key, value in overrides:
        yield f"{section}.{key}={value}", _with_keys(run, section, **{key: value}), hardware
    yield from _other_cuts(run, hardware)


def _other_cuts(run: RunConfig, hardware: HardwareSpec) -> Iterator[_Request]:
    """Yield requests with other numbers of subsequences if the request fixes one."""
    if run.sequence.num_subsequences == "auto" and run.sequence.boundaries is None:
        return
    free = without_keys(run, sequence=["num_subsequences", "boundaries"])
    counts = subsequence_counts_to_try(free, hardware=hardware)
    for count in counts[:: max(1, len(counts) // 4)]:
        override = f"sequence.num_subsequences={count}"
        if run.sequence.boundaries is not None:
            override += " sequence.boundaries=null"
        yield override, _with_keys(free, "sequence", num_subsequences=count), hardware
