"""Tiers in which the training state of a run may live, as its run file says."""

from __future__ import annotations

from dataclasses import asdict

from sppo.config.rules import WITH_VIRTUAL_STAGES
from sppo.config.run import RunConfig, StateConfig
from sppo.cost.state_tiers import StateTier, StateTiers
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.choices import machine_asked_for, shares_units

_PARTS = ("weights", "gradients", "optimizer")
_LEAVING = ((), ("optimizer",), ("gradients", "optimizer"), _PARTS)
"""Parts of the state that leave the device, from the least costly to what frees most."""


def runs_by_state(run: RunConfig, *, hardware: HardwareSpec) -> tuple[RunConfig, ...]:
    """Return `run` with each place decided where its state may live, the nearest first.

    Whoever looks for what fits takes the first that does. One farther away leaves policies more
    memory, and may be faster: `improvements` lists that.

    Raises:
        ValueError: the run asks for a tier that the machine does not have.
    """
    choices = state_choices(run, hardware=machine_asked_for(run, hardware=hardware))
    optimizer = run.optimizer.model_copy(update={"offload": False})
    return tuple(
        run.model_copy(update={"state": StateConfig(**asdict(tiers)), "optimizer": optimizer})
        for tiers in choices
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
    behind: StateTier = "disk" if on_cpu else "host"
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


def _asked(run: RunConfig, part: str, *, on_cpu: bool) -> StateTier | None:
    """Return the tier that a run writes; None where it leaves that open."""
    written = getattr(run.state, part)
    if part == "optimizer" and run.optimizer.offload:
        written = "host"
    if written == "auto":
        return None
    tier: StateTier = "device" if on_cpu and written == "host" else written
    return tier


def _may_have_stages(run: RunConfig) -> bool:
    """Return whether ranks may have several stages, one behind the other on the device."""
    parallel = run.parallel
    schedules = ("auto", *WITH_VIRTUAL_STAGES)
    several = parallel.virtual_stages != 1 and parallel.schedule in schedules
    return several and not shares_units(run)
