"""Hardware description that a run file names; this machine if the run file names none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from sppo.config.problems import nearest
from sppo.config.run import DEFAULT_MARGIN, HardwareConfig, RunConfig
from sppo.hardware.description import HOST_FRACTION, HardwareSpec
from sppo.hardware.file import read_hardware
from sppo.hardware.presets import PRESETS
from sppo.quoting import quoted
from sppo.units import format_bytes


def run_hardware(run: RunConfig) -> HardwareSpec:
    """Return the hardware description that `run` is planned for.

    CPUs are divided among the ranks that `run` asks for: those of this machine by its cores and
    OMP_NUM_THREADS, as training does, those of another one by the threads of its rates.

    Raises:
        ValueError: An unknown preset, a file that is no hardware description, or a key that the
            machine does not support.
        OSError: The file cannot be read.
    """
    from sppo.hardware.this_machine import as_seen_by_ranks, detect_machine

    here, parallel = detect_machine(), run.parallel
    hardware = hardware_for(run.hardware, this_machine=here)
    ranks = (
        parallel.data_parallel_degree
        * parallel.pipeline_parallel_degree
        * parallel.sequence_parallel_degree
    )
    return as_seen_by_ranks(hardware, ranks, is_here=hardware.name == here.name)


def hardware_for(
    config: Literal["auto"] | HardwareConfig, *, this_machine: HardwareSpec | None = None
) -> HardwareSpec:
    """Return the hardware description that a run file names, with the memory that plans may fill.

    Args:
        config: Value of the run file's ``hardware``.
        this_machine: Machine that "auto" refers to; if None, the preset "laptop-cpu".

    Raises:
        ValueError: An unknown preset, a file that is no hardware description, or a key that the
            machine does not support.
        OSError: The file cannot be read.
    """
    if config == "auto":
        return _plannable(this_machine or PRESETS["laptop-cpu"], DEFAULT_MARGIN)
    if config.file is not None:
        spec = read_hardware(Path(config.file))
    elif config.preset is None:
        spec = this_machine or PRESETS["laptop-cpu"]
    elif config.preset in PRESETS:
        spec = PRESETS[config.preset]
    else:
        raise ValueError(
            f"hardware.preset {quoted(config.preset)} is not one of {', '.join(PRESETS)}."
            f"{nearest(config.preset, tuple(PRESETS))}"
        )
    node, given = spec.node, config.model_fields_set
    if "devices_per_node" in given:
        node = replace(node, num_devices=config.devices_per_node)
    if config.host_memory is not None:
        if spec.device.kind == "cpu":
            raise ValueError(
                f"hardware.host_memory {format_bytes(config.host_memory)}: the memory of "
                f"{spec.name} is its device's, there is none behind it: leave the key out"
            )
        node = replace(node, host_memory_bytes=config.host_memory)
    if config.attention != "auto":
        spec = _with_attention(spec, config.attention)
    num_nodes = config.nodes if "nodes" in given else spec.num_nodes
    return _plannable(replace(spec, node=node, num_nodes=num_nodes), config.margin)


def _with_attention(spec: HardwareSpec, backend: str) -> HardwareSpec:
    """Return `spec` with attention predicted from the published rates of `backend`.

    Raises:
        ValueError: `spec` has measured attention, or no published rates of `backend`.
    """
    device = spec.device
    if device.attention_points or backend not in device.published_backends:
        known = "" if device.attention_points else ", ".join(device.published_backends)
        reason = "was measured there" if device.attention_points else "is not known there"
        raise ValueError(
            f"hardware.attention {backend} on {spec.name}: its rate {reason}; leave the key out"
            + (f", or write one of {known}" if known else "")
        )
    return replace(spec, device=replace(device, attention_backend=backend))


def _plannable(spec: HardwareSpec, margin: float) -> HardwareSpec:
    """Return `spec` with the memory that plans may fill.

    The fraction `margin` of each device's memory is added to its reserve, and of host memory
    `HOST_FRACTION` is left.
    """
    device, node = spec.device, spec.node
    reserved = device.reserved_bytes + round(margin * device.memory_bytes)
    reserved = min(reserved, device.memory_bytes)
    return replace(
        spec,
        device=replace(device, reserved_bytes=reserved),
        node=replace(node, host_memory_bytes=int(node.host_memory_bytes * HOST_FRACTION)),
    )


def hardware_line(hardware: HardwareSpec) -> str:
    """Return one line with the machine's name, size, and the origin of its figures."""
    nodes, devices = hardware.num_nodes, hardware.node.num_devices
    size = f"{nodes} x {devices} devices" if nodes > 1 else f"{devices} devices"
    if hardware.num_devices == 1:
        size = "1 device"
    return f"{hardware.shown_name}, {size} (rates {hardware.provenance})"
