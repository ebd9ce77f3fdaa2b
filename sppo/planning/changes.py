"""Changes of a request: those that would make it fit, and those that would make it faster.

The changed request is searched like the request itself, without alternatives, and the effect of the
change is that of its best candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from sppo.config.adapter import AdapterConfig
from sppo.config.run import DEGREES, HardwareConfig, RunConfig
from sppo.cost.trainable import counts_text, trainable_of_run
from sppo.hardware.description import HardwareSpec
from sppo.planning.longest_sequence import fits_at_all, longest_sequence
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.solver import Solution, quick_best
from sppo.units import format_bytes, format_duration, format_tokens

MachineOf = Callable[[RunConfig], HardwareSpec]
"""Function that returns the machine that the ranks of a run see, since ranks divide a CPU."""
_Request = tuple[str, RunConfig, HardwareSpec]
"""Change as text, changed run, and the machine that it sees."""

LEAST_GAIN = 1.03
"""Tokens per second and device from which a change is listed, relative to the best answer."""
_LISTED = 4
_AS_FAST = 1.01
"""Step time allowed on fewer nodes, relative to the best answer."""
MOST_NODES = 1024
_RANK = 16
"""Usual rank of adapters."""
_DIVISION = {
    "parallel": (*DEGREES, "virtual_stages"),
    "sequence": ("num_subsequences", "boundaries"),
}
"""Keys that the solver chooses if they are left out, by section; the other ones may be auto."""
_AUTOMATIC = {
    "parallel": ("schedule",),
    "activations": ("policy", "offload_ratio", "kv", "tier"),
    "state": ("weights", "gradients"),
}
"""Keys that the solver chooses if they are auto, by section."""


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
    requests = [*_without_division(run, machine_of), *_other_values(run, hardware)]
    return (
        *_fitting(requests),
        *_with_adapter(run, hardware),
        *_shorter(run, hardware),
        *_more_nodes(run, machine_of),
    )


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
    """Return the changes of a feasible request that gain most, best first.

    Args:
        solution: Answer to a request that fits.
    """
    run, hardware, best = solution.run, solution.hardware, solution.best
    assert best is not None, "only asked of what fits"
    more = {"train.sequences_per_step": 2 * run.train.sequences_per_step}
    requests = [_with_values(run, hardware, more), *_other_values(run, hardware)]
    used = -(-best.degrees.num_devices // hardware.node.num_devices)
    nodes = used if used < hardware.num_nodes else hardware.num_nodes // 2
    if nodes:
        requests.append((f"hardware.nodes={nodes}", run, replace(hardware, num_nodes=nodes)))
    rate = best.tokens_per_s / hardware.num_devices
    found = []
    for text, changed, machine in requests:
        tokens = changed.sequence.length * changed.train.sequences_per_step / machine.num_devices
        most_s = tokens / rate / LEAST_GAIN
        if machine.num_nodes < hardware.num_nodes:
            most_s = min(most_s, best.step_s * _AS_FAST)
        faster = quick_best(changed, machine, below=most_s)
        if faster is not None and faster.step_s <= most_s:
            found.append(Change(text, best=faster, gain=tokens / faster.step_s / rate))
    return tuple(sorted(found, key=lambda change: -change.gain)[:_LISTED])


def _with_values(run: RunConfig, hardware: HardwareSpec, values: Mapping[str, object]) -> _Request:
    """Return a request with other values of some keys, each named ``section.key``."""
    words = (f"{name}={'null' if value is None else value}" for name, value in values.items())
    return " ".join(words), run.with_values(values), hardware


def _other_values(run: RunConfig, hardware: HardwareSpec) -> Iterator[_Request]:
    """Yield requests with another tier, ZeRO level, schedule, policy or cuts."""
    changes: list[Mapping[str, object]] = []
    for section, keys in _AUTOMATIC.items():
        fixed = [key for key in keys if getattr(getattr(run, section), key) != "auto"]
        if fixed:
            changes.append({f"{section}.{key}": "auto" for key in fixed})
    on_gpu = hardware.device.kind != "cpu" and hardware.node.host_memory_bytes > 0
    if on_gpu and run.state.optimizer in ("auto", "device"):
        changes.append({"state.optimizer": "host"})
    freezes = not trainable_of_run(run).is_everything
    if on_gpu and freezes and run.state.weights in ("auto", "device"):
        changes.append({"state.weights": "host"})
    if hardware.node.disk_bytes and run.activations.disk is None:
        changes.append({"activations.disk": "DIR"})
    changes += [{"parallel.zero": level} for level in range(run.parallel.zero + 1, 4)]
    if run.sequence.boundaries is not None:
        changes.append({"sequence.boundaries": None, "sequence.num_subsequences": "auto"})
    elif run.sequence.num_subsequences != "auto":
        changes.append({"sequence.num_subsequences": "auto"})
    for values in changes:
        yield _with_values(run, hardware, values)


def _without_division(run: RunConfig, machine_of: MachineOf) -> Iterator[_Request]:
    """Yield the request as if its degrees, stages on a rank and cuts had not been written."""
    freed, left_out = run, []
    for section, keys in _DIVISION.items():
        own = getattr(run, section)
        given = {key: getattr(own, key) for key in own.model_fields_set}
        left_out += [f"{section}.{key}" for key in keys if given.pop(key, None) is not None]
        freed = freed.model_copy(update={section: type(own)(**given)})
    if left_out:
        yield f"leave out {', '.join(left_out)}", freed, machine_of(freed)


def _with_adapter(run: RunConfig, hardware: HardwareSpec) -> Iterator[Change]:
    """Yield the request with adapters beside frozen weights, if it trains all published weights."""
    published = run.model.from_hf is not None or run.start is not None
    if not published or not trainable_of_run(run).is_everything:
        return
    adapted = run.model_copy(update={"adapter": AdapterConfig(rank=_RANK)})
    for change in _fitting([(f"adapter.rank={_RANK}", adapted, hardware)]):
        yield replace(change, effect=f"{counts_text(adapted)}, {change.effect}")


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
        if many >= MOST_NODES:
            return
        few, many = many, min(2 * many, MOST_NODES)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if fits_at_all(run, on_nodes(middle)) else (middle, many)
    for change in _fitting([(f"hardware.nodes={many}", run, on_nodes(many))]):
        yield replace(change, effect=f"{on_nodes(many).num_devices} devices, {change.effect}")
