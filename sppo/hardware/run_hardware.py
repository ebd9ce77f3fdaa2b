"""The machine that a run file names, this one where it names none."""

from __future__ import annotations

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.hardware.file import hardware_for


def run_hardware(run: RunConfig) -> HardwareSpec:
    """Return the machine that `run` is planned for.

    Raises:
        ValueError: an unknown preset, or a file that is no hardware description.
        OSError: the file cannot be read.
    """
    config = run.hardware
    if config != "auto" and (config.file is not None or config.preset is not None):
        return hardware_for(config)
    from sppo.hardware.this_machine import detect_machine

    return hardware_for(config, this_machine=detect_machine())


def hardware_line(hardware: HardwareSpec) -> str:
    """Name, size, and where its figures come from."""
    nodes, devices = hardware.num_nodes, hardware.node.num_devices
    size = f"{nodes} x {devices} devices" if nodes > 1 else f"{devices} devices"
    if hardware.num_devices == 1:
        size = "1 device"
    return f"{hardware.name}, {size} (rates {hardware.provenance})"
