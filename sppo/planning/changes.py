"""Changes of a request: those that would make it fit, and those that would make it faster.

The changed request is searched like the request itself, without alternatives, and the effect of the
change is that of its best candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sppo.config.run import DEGREES, HardwareConfig, RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.longest_sequence import fits_at_all, longest_sequence
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.solver import Solution, quick_best
from sppo.units import format_bytes, format_duration, format_tokens

MachineOf = Callable[[RunConfig], HardwareSpec]
"""Function that returns the machine that the ranks of a run see, since ranks divide a CPU."""
_Request = tuple[str, RunConfig, HardwareSpec]
"""Change as text, changed run, and the machine that it sees."""

WORTH_IT = 1.03
"""Tokens per second and device from which a change is listed, relative to the best answer."""
_LISTED = 4
_STARVED = 0.1
"""Bubble fraction from which more sequences per step are tried."""
_MOST_UNITS = 200_000
"""Stages x units up to which more sequences per step are tried."""
_AS_FAST = 1.01
"""Step time allowed on fewer nodes, relative to the best answer."""
_MOST_NODES = 1024
_ROOMY_BYTES = 1 << 50
_CUTS = ("num_subsequences", "boundaries")
_CHOSEN = {
    "parallel": (*DEGREES, "schedule", "virtual_stages"),
    "sequence": _CUTS,
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


def what_would_fit(run: RunConfig, *, machine_of: MachineOf) -> tuple[Change, ...]:
    """Return changes each of which makes a request feasible, the easiest first.

    Args:
        run: Request that does not fit.
        machine_of: Function that returns the machine that the ranks of a changed run see.
    """
    hardware = machine_of(run)
    node, written = hardware.node, _written(run)
    requests = [*_other_values(run, hardware)]
    if node.host_memory_bytes:
        roomy = replace(hardware, node=replace(node, host_memory_bytes=_ROOMY_BYTES))
        requests.append(("more host memory per node", run, roomy))
    division = [(section, key) for section, key in written if key in (*DEGREES, *_CUTS)]
    changes = [*_fitting([*_left_out(run, division, machine_of), *requests])]
    if not changes and written != division:
        changes = [*_fitting(_left_out(run, written, machine_of))]
    return (*changes, *_shorter(run, hardware), *_more_nodes(run, machine_of))


def _fitting(requests: Iterable[_Request]) -> Iterator[Change]:
    """Yield the changes of those requests that fit."""
    for text, run, hardware in requests:
        best = quick_best(run, hardware) if fits_at_all(run, hardware) else None
        if best is not None:
            effect = f"{format_duration(best.step_s)} a step"
            if best.node_host_bytes:
                effect += f", {format_bytes(best.node_host_bytes)} of host memory a node"
            yield Change(text, effect, best)


def improvements(solution: Solution) -> tuple[Change, ...]:
    """Return the changes of a feasible request that gain most, the best value of each key first.

    Args:
        solution: Answer to a request that fits.
    """
    run, hardware, best = solution.run, solution.hardware, solution.best
    assert best is not None, "only asked of what fits"
    requests = [*_more_sequences(solution, best), *_fewer_nodes(solution, best)]
    requests += _other_values(run, hardware)
    rate = best.tokens_per_s / hardware.num_devices
    found = []
    for text, changed, machine in requests:
        tokens = changed.sequence.length * changed.train.sequences_per_step / machine.num_devices
        most_s = tokens / rate / WORTH_IT
        if machine.num_nodes < hardware.num_nodes:
            most_s = min(most_s, best.step_s * _AS_FAST)
        faster = quick_best(changed, machine, below=most_s)
        if faster is not None and faster.step_s <= most_s:
            found.append(Change(text, best=faster, gain=tokens / faster.step_s / rate))
    by_key: dict[str, Change] = {}
    # Of values that gain about as much, the first.
    for change in sorted(found, key=lambda change: round(change.gain, 2), reverse=True):
        by_key.setdefault(change.change.partition("=")[0], change)
    return tuple(sorted(by_key.values(), key=lambda change: -change.gain)[:_LISTED])


# Changed requests.


def _with_values(run: RunConfig, hardware: HardwareSpec, values: Mapping[str, object]) -> _Request:
    """Return a request with other values of some keys, each named ``section.key``."""
    for name, value in values.items():
        section, key = name.split(".")
        changed = getattr(run, section).model_copy(update={key: value})
        run = run.model_copy(update={section: changed})
    words = (f"{name}={'null' if value is None else value}" for name, value in values.items())
    return " ".join(words), run, hardware


def _other_values(run: RunConfig, hardware: HardwareSpec) -> Iterator[_Request]:
    """Yield requests with another tier, ZeRO level, schedule, policy or cuts."""
    on_gpu = hardware.device.kind != "cpu" and hardware.node.host_memory_bytes > 0
    changes: list[Mapping[str, object]] = []
    if on_gpu and run.state.optimizer in ("auto", "device"):
        changes.append({"state.optimizer": "host"})
    if hardware.node.disk_bytes and run.activations.disk is None:
        changes.append({"activations.disk": "DIR"})
    changes += [{"parallel.zero": level} for level in range(run.parallel.zero + 1, 4)]
    if run.parallel.schedule != "auto":
        changes.append({"parallel.schedule": "auto"})
    placed = {
        f"activations.{key}": "auto"
        for key in ("policy", "offload_ratio")
        if getattr(run.activations, key) not in ("auto", "hybrid")
    }
    if placed:
        changes.append(placed)
    if run.sequence.boundaries is not None:
        changes.append({"sequence.boundaries": None, "sequence.num_subsequences": "auto"})
    elif run.sequence.num_subsequences != "auto":
        changes.append({"sequence.num_subsequences": "auto"})
    for values in changes:
        yield _with_values(run, hardware, values)


def _written(run: RunConfig) -> list[tuple[str, str]]:
    """Return the section and name of each key that the solver can choose and the run writes."""
    return [
        (section, key)
        for section, keys in _CHOSEN.items()
        for key in keys
        if key in getattr(run, section).model_fields_set
    ]


def _left_out(
    run: RunConfig, keys: Sequence[tuple[str, str]], machine_of: MachineOf
) -> Iterator[_Request]:
    """Yield the request as if some keys, each a section and a name, had not been written."""
    freed = run
    for section, key in keys:
        written = getattr(freed, section)
        given = written.model_fields_set - {key}
        less = type(written)(**{name: getattr(written, name) for name in given})
        freed = freed.model_copy(update={section: less})
    if keys:
        names = ", ".join(f"{section}.{key}" for section, key in keys)
        yield f"leave out {names}", freed, machine_of(freed)


def _shorter(run: RunConfig, hardware: HardwareSpec) -> Iterator[Change]:
    """Yield the longest sequence that fits."""
    length = 0 if run.sequence.boundaries is not None else longest_sequence(run, hardware)
    if 0 < length < run.sequence.length:
        yield Change(f"sequence.length={format_tokens(length)}", "the longest that fits here")


def _more_nodes(run: RunConfig, machine_of: MachineOf) -> Iterator[Change]:
    """Yield the fewest nodes of this kind on which the run fits, unless it needs too many."""

    def on_nodes(nodes: int) -> HardwareSpec:
        config = HardwareConfig() if run.hardware == "auto" else run.hardware
        config = config.model_copy(update={"nodes": nodes})
        return machine_of(run.model_copy(update={"hardware": config}))

    many = machine_of(run).num_nodes
    few = many - 1
    while not fits_at_all(run, on_nodes(many)):
        few, many = many, 2 * many
        if many > _MOST_NODES:
            return
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if fits_at_all(run, on_nodes(middle)) else (middle, many)
    for change in _fitting([(f"hardware.nodes={many}", run, on_nodes(many))]):
        yield replace(change, effect=f"{on_nodes(many).num_devices} devices, {change.effect}")


def _more_sequences(solution: Solution, best: EvaluatedCandidate) -> Iterator[_Request]:
    """Yield doubled numbers of sequences per step if the bubble is large or devices are unused."""
    run, hardware = solution.run, solution.hardware
    idle = best.degrees.num_devices < hardware.num_devices
    if best.simulated.bubble_fraction < _STARVED and not idle:
        return
    units = best.costs.forward_s.size // best.candidate.sequences
    sequences = 2 * run.train.sequences_per_step
    while sequences <= min(hardware.num_devices, _MOST_UNITS // units):
        yield _with_values(run, hardware, {"train.sequences_per_step": sequences})
        sequences *= 2


def _fewer_nodes(solution: Solution, best: EvaluatedCandidate) -> Iterator[_Request]:
    """Yield the nodes that the best answer uses; half of them if it uses all."""
    hardware = solution.hardware
    used = -(-best.degrees.num_devices // hardware.node.num_devices)
    nodes = used if used < hardware.num_nodes else hardware.num_nodes // 2
    if nodes:
        yield f"hardware.nodes={nodes}", solution.run, replace(hardware, num_nodes=nodes)
