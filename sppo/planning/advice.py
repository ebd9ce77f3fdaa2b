"""Advice on changes that make a request fit, each with the predicted effect.

Each change is evaluated by the solver's closed forms: fewer fixed keys, another activation policy,
optimizer states in host memory, a larger tier, a shorter sequence, more nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sppo.config.run import HardwareConfig, RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.estimate import model_counts
from sppo.planning.longest_sequence import fits_at_all, longest_sequence
from sppo.planning.search.choices import virtual_stages_to_try
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.solver import quick_best
from sppo.units import format_bytes, format_duration, format_tokens

MachineOf = Callable[[RunConfig], HardwareSpec]
"""Function that returns the machine that the ranks of a run see."""

_MOST_NODES = 1024
_TIB = 1 << 40
_DEGREES = ("data_parallel_degree", "pipeline_parallel_degree", "sequence_parallel_degree")
_CUTS = ("num_subsequences", "boundaries")
_OFFLOAD = "state.optimizer=host"
_SOME_DIRECTORY = "DIR"
"""Placeholder in advice for a directory on a disk of the machine."""
_CHOSEN = {
    "parallel": (*_DEGREES, "schedule", "virtual_stages"),
    "sequence": _CUTS,
    "activations": ("policy", "offload_ratio", "kv", "tier"),
    "state": ("weights", "gradients", "optimizer"),
}
"""Keys that the solver chooses if a run file leaves them out, by section."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One change that makes a request feasible.

    Attributes:
        change: Change as text, such as the override to write.
        effect: Effect of the change as text.
        step_s: Seconds of a step after the change, in closed form; None if the change shortens the
            sequence.
        node_host_bytes: Host memory that the devices of a node use after the change; None if the
            change shortens the sequence.
    """

    change: str
    effect: str
    step_s: float | None = None
    node_host_bytes: int | None = None


def what_would_fit(
    run: RunConfig, *, hardware: HardwareSpec, machine_of: MachineOf | None = None
) -> tuple[Advice, ...]:
    """Return the smallest changes that make a request feasible, easiest first.

    Args:
        run: Request that does not fit.
        hardware: Description of the machine, as the ranks of `run` see it.
        machine_of: Function that returns the machine that the ranks of a changed run see, since
            ranks divide a CPU among them; None if every run sees `hardware`.
    """
    machine_of = machine_of or _same_machine(run, hardware)
    changes = (
        *_fewer_conditions(run, machine_of),
        *_other_policies(run, hardware),
        *_tiers(run, hardware),
        *_shorter(run, hardware),
        *_more_nodes(run, machine_of),
    )
    if all(advice.change.startswith("sequence.length=") for advice in changes):
        return (*changes, *_no_conditions(run, machine_of))
    return changes


def _same_machine(run: RunConfig, hardware: HardwareSpec) -> MachineOf:
    """Return the function to `hardware` of any run, with as many nodes as a changed run writes."""

    def machine_of(changed: RunConfig) -> HardwareSpec:
        if changed.hardware == "auto" or changed.hardware == run.hardware:
            return hardware
        return replace(hardware, num_nodes=changed.hardware.nodes)

    return machine_of


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


def _advice(change: str, best: EvaluatedCandidate) -> Advice:
    """Return advice for a change, with the step time and host memory of its best candidate."""
    host = best.node_host_bytes
    text = f"{format_duration(best.step_s)} a step"
    if host:
        text += f", {format_bytes(host)} of host memory a node"
    return Advice(change, text, best.step_s, host)


def _fewer_conditions(run: RunConfig, machine_of: MachineOf) -> Iterator[Advice]:
    """Yield advice to leave out the fewest of the written degrees and cuts that make it fit."""
    parallel = [key for key in _DEGREES if key in run.parallel.model_fields_set]
    cuts = [key for key in _CUTS if key in run.sequence.model_fields_set]
    for degrees, num_subsequences in (([], cuts), (parallel, []), (parallel, cuts)):
        if not degrees and not num_subsequences:
            continue
        freed = without_keys(run, parallel=degrees, sequence=num_subsequences)
        best = quick_best(freed, machine_of(freed))
        if best is not None:
            keys = [f"parallel.{key}" for key in degrees] + [
                f"sequence.{key}" for key in num_subsequences
            ]
            yield _advice(f"leave out {', '.join(keys)}", best)
            return


def _no_conditions(run: RunConfig, machine_of: MachineOf) -> Iterator[Advice]:
    """Yield advice to leave out all keys that the solver can choose.

    If that alone does not fit, each piece of advice also names a shorter sequence or more nodes.
    """
    written = {
        section: [key for key in keys if key in getattr(run, section).model_fields_set]
        for section, keys in _CHOSEN.items()
    }
    freed = without_keys(run, **written)
    names = [f"{section}.{key}" for section, keys in written.items() for key in keys]
    left_out = f"leave out {', '.join(names)}"
    best = quick_best(freed, machine_of(freed)) if names else None
    if best is not None:
        yield _advice(left_out, best)
    elif names:
        for advice in (*_shorter(freed, machine_of(freed)), *_more_nodes(freed, machine_of)):
            yield replace(advice, change=f"{advice.change}, and {left_out}")


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


def _other_policies(run: RunConfig, hardware: HardwareSpec) -> Iterator[Advice]:
    if run.activations.policy in ("auto", "hybrid"):
        return
    for policy in ("hybrid", "keep_attention", "recompute"):
        change = {"policy": policy, "offload_ratio": "auto"}
        activations = run.activations.model_copy(update=change)
        best = quick_best(run.model_copy(update={"activations": activations}), hardware)
        if best is not None:
            yield _advice(f"activations.policy={policy}", best)
            return


def _tiers(run: RunConfig, hardware: HardwareSpec) -> Iterator[Advice]:
    """Yield advice on tiers: optimizer states in host memory, a disk of the node, a larger tier."""
    if _may_offload(run, hardware):
        best = quick_best(_offloading(run), hardware)
        if best is not None:
            yield _advice(_OFFLOAD, best)
    node = hardware.node
    if node.disk_bytes and run.activations.disk is None:
        activations = run.activations.model_copy(update={"disk": _SOME_DIRECTORY})
        best = quick_best(run.model_copy(update={"activations": activations}), hardware)
        if best is not None:
            yield _advice(f"activations.disk={_SOME_DIRECTORY}", best)
    for name, what in (("host_memory_bytes", "host memory"), ("disk_bytes", "disk space")):
        if getattr(node, name):
            roomy = replace(hardware, node=replace(node, **{name: 1024 * _TIB}))
            best = quick_best(run, roomy)
            if best is not None:
                yield _advice(f"more {what} per node", best)
                return


def _may_offload(run: RunConfig, hardware: HardwareSpec) -> bool:
    host = hardware.node.host_memory_bytes
    return run.state.optimizer == "device" and host > 0 and hardware.device.kind != "cpu"


def _offloading(run: RunConfig) -> RunConfig:
    """Return `run` with optimizer states in host memory."""
    state = run.state.model_copy(update={"optimizer": "host"})
    return run.model_copy(update={"state": state})


def _shorter(run: RunConfig, hardware: HardwareSpec) -> Iterator[Advice]:
    if run.sequence.boundaries is not None:
        return
    length = longest_sequence(run, hardware)
    if 0 < length < run.sequence.length:
        yield Advice(f"sequence.length={format_tokens(length)}", "the longest that fits here")


def _more_nodes(run: RunConfig, machine_of: MachineOf) -> Iterator[Advice]:
    """Yield advice on the fewest nodes that fit, with the optimizer on the device or on the host.

    Optimizer states in host memory are advised only if fewer nodes fit with them.
    """
    hardware, nodes = machine_of(run), _fewest_nodes(run, machine_of)
    requests = [("", run, nodes)]
    if _may_offload(run, hardware):
        offloading = _offloading(run)
        fewer = _fewest_nodes(offloading, machine_of)
        if fewer is not None and fewer > hardware.num_nodes and (nodes is None or fewer < nodes):
            requests.append((f" {_OFFLOAD}", offloading, fewer))
    for also, request, count in requests:
        if count is None:
            continue
        machine = _of_nodes(request, count, machine_of)
        best = quick_best(request, machine)
        if best is not None:
            advice = _advice(f"hardware.nodes={count}{also}", best)
            yield replace(advice, effect=f"{machine.num_devices} devices, {advice.effect}")


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
