"""Tiers in which activations and the training state of a run may live, as its run file says."""

from __future__ import annotations

from dataclasses import asdict

from sppo.config.rules import WITH_VIRTUAL_STAGES
from sppo.config.run import RunConfig, StateConfig
from sppo.cost.state_tiers import StateTiers
from sppo.hardware.description import HardwareSpec, Tier
from sppo.planning.search.choices import activation_tiers, machine_asked_for, shares_units

_PARTS = ("weights", "gradients", "optimizer")
_LEAVING = ((), ("optimizer",), ("gradients", "optimizer"), _PARTS)
"""Parts of the state that leave the device, from the least costly to what frees most."""


def runs_by_tiers(run: RunConfig, *, hardware: HardwareSpec) -> tuple[RunConfig, ...]:
    """Return `run` with each place decided for activations and for its state, the nearest first.

    Whoever looks for what fits takes the first that does: activations go to a disk where host
    memory is too small for them, wherever the state is. A place farther away leaves policies more
    memory, and may be faster: `improvements` lists that.

    Raises:
        ValueError: the run asks for a tier that the machine does not have.
    """
    machine = machine_asked_for(run, hardware=hardware)
    optimizer = run.optimizer.model_copy(update={"offload": False})
    return tuple(
        run.model_copy(
            update={
                "activations": run.activations.model_copy(update={"tier": tier}),
                "state": StateConfig(**asdict(tiers)),
                "optimizer": optimizer,
            }
        )
        for tier in activation_tiers(run, hardware=machine)
        for tiers in state_choices(run, hardware=machine)
    )


def state_choices(run: RunConfig, *, hardware: HardwareSpec) -> tuple[StateTiers, ...]:
    """Return where the state may live, the nearest to the device first.

    On a CPU host memory is the device's, and nothing goes to a disk unless it is asked to. Weights
    and gradients leave by themselves only where a rank may have several stages.

    Args:
        run: checked.
        hardware: the machine, with the tiers that the run may use.
    """
    on_cpu = hardware.device.kind == "cpu"
    asked = {part: _asked(run, part, on_cpu=on_cpu) for part in _PARTS}
    behind: Tier = "disk" if on_cpu else "host"
    may_leave = not on_cpu and hardware.node.host_memory_bytes > 0
    choices: list[StateTiers] = []
    for leaving in _LEAVING if may_leave else _LEAVING[:1]:
        if "gradients" in leaving and not _may_have_stages(run):
            break
        tiers = {part: asked[part] or (behind if part in leaving else "device") for part in _PARTS}
        if {tiers["weights"], tiers["gradients"]} != {"device"}:
            if asked["optimizer"] == "device":
                break
            tiers["optimizer"] = behind  # it steps beside them
        chosen = StateTiers(**tiers)
        if chosen not in choices:
            choices.append(chosen)
    return tuple(choices)


def _asked(run: RunConfig, part: str, *, on_cpu: bool) -> Tier | None:
    """Return the tier that a run writes; None where it leaves that open."""
    written = getattr(run.state, part)
    if part == "optimizer" and run.optimizer.offload:
        written = "host"
    if written == "auto":
        return None
    tier: Tier = "device" if on_cpu and written == "host" else written
    return tier


def _may_have_stages(run: RunConfig) -> bool:
    """Return whether ranks may have several stages, one behind the other on the device."""
    parallel = run.parallel
    schedules = ("auto", *WITH_VIRTUAL_STAGES)
    several = parallel.virtual_stages != 1 and parallel.schedule in schedules
    return several and not shares_units(run)
