"""Tiers that a run file allows for activations and for the training state."""

from __future__ import annotations

from dataclasses import asdict

from sppo.config.run import RunConfig, StateConfig
from sppo.cost.state_tiers import StateTiers
from sppo.cost.trainable import trainable_of_run
from sppo.hardware.description import HardwareSpec, Tier
from sppo.planning.search.choices import (
    activation_tiers,
    machine_asked_for,
    uses_msp,
    virtual_stages_to_try,
)

_PARTS = ("weights", "gradients", "optimizer")
_FROZEN = ("weights",)
"""Frozen weights leave the device alone; those that train leave with the optimizer."""
_LEAVING = ((), _FROZEN, ("optimizer",), ("gradients", "optimizer"), _PARTS)
"""Sets of parts of the state that leave the device, from the cheapest to the one that frees most
memory."""


def runs_by_tiers(run: RunConfig, *, hardware: HardwareSpec) -> tuple[RunConfig, ...]:
    """Return `run` with each choice of tiers for activations and the training state, nearest first.

    Callers use the first choice that fits: activations go to a disk only if host memory is too
    small for them with any tiers of the state. Farther tiers leave policies more device memory and
    may be faster; `changes.improvements` lists such changes.

    Raises:
        ValueError: The run asks for a tier that the machine does not have.
    """
    machine = machine_asked_for(run, hardware=hardware)
    return tuple(
        run.model_copy(
            update={
                "activations": run.activations.model_copy(update={"tier": tier}),
                "state": StateConfig(**asdict(tiers)),
            }
        )
        for tier in activation_tiers(run, hardware=machine)
        for tiers in state_choices(run, hardware=machine)
    )


def state_choices(run: RunConfig, *, hardware: HardwareSpec) -> tuple[StateTiers, ...]:
    """Return the choices of tiers for the training state, the nearest to the device first.

    State leaves a GPU to host memory, and a CPU, whose host memory is device memory, to the disk.
    Weights and gradients leave without being asked to only if a rank may have several stages. The
    optimizer leaves with gradients, and with weights unless some of them are frozen.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine, with the tiers that the run may use.

    Raises:
        ValueError: The run asks for a tier that the machine does not have.
    """
    on_cpu = hardware.device.kind == "cpu"
    asked = {part: _asked(run, part, on_cpu=on_cpu) for part in _PARTS}
    behind: Tier = "disk" if on_cpu else "host"
    node = hardware.node
    may_leave = (node.disk_bytes if on_cpu else node.host_memory_bytes) > 0
    may_have_stages = not uses_msp(run) and virtual_stages_to_try(run, num_ranks=1) != (1,)
    freezes = not trainable_of_run(run).is_everything
    followed = ("gradients",) if freezes else ("weights", "gradients")
    choices: list[StateTiers] = []
    for leaving in _LEAVING if may_leave else _LEAVING[:1]:
        if leaving == _FROZEN and not freezes:
            continue
        if {"weights", "gradients"} & {*leaving} and not may_have_stages:
            continue
        tiers = {part: asked[part] or (behind if part in leaving else "device") for part in _PARTS}
        if any(tiers[part] != "device" for part in followed):
            if asked["optimizer"] == "device":
                continue
            tiers["optimizer"] = behind  # the optimizer steps where these are
        chosen = StateTiers(**tiers)
        _check_tiers(chosen, hardware=hardware)
        if chosen not in choices:
            choices.append(chosen)
    return tuple(choices)


def _check_tiers(state: StateTiers, *, hardware: HardwareSpec) -> None:
    """Raise ValueError if the training state is placed in a tier that the machine does not have.

    Raises:
        ValueError: A tier is missing; the message names the part of the state, the tier, and what
            to write.
    """
    for part in _PARTS:
        tier = getattr(state, part)
        if tier == "host" and not hardware.node.host_memory_bytes:
            raise ValueError(
                f"state.{part}=host keeps it in host memory, and {hardware.name} has none beside "
                f"its devices', or activations.host_memory leaves none: write state.{part}=device"
            )
        on_gpu = hardware.device.kind == "cuda"
        if tier == "disk" and (on_gpu or not hardware.node.disk_bytes):
            raise ValueError(
                f"state.{part}=disk keeps it on a disk, and "
                + (
                    "what leaves a GPU goes to host memory: write host, or device"
                    if on_gpu
                    else f"on {hardware.name} there is none that may be used: name a directory "
                    "(activations.disk=DIR)"
                )
            )


def _asked(run: RunConfig, part: str, *, on_cpu: bool) -> Tier | None:
    """Return the tier that a run asks for a part of the state; None if it leaves the tier open."""
    written = getattr(run.state, part)
    if written == "auto":
        return None
    tier: Tier = "device" if on_cpu and written == "host" else written
    return tier
