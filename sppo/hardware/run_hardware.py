"""Hardware description that a run file names; this machine if the run file names none."""

from __future__ import annotations

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.hardware.file import hardware_for


def run_hardware(run: RunConfig) -> HardwareSpec:
    """Return the hardware description that `run` is planned for.

    CPUs are divided among the ranks that `run` asks for: those of this machine by its cores and
    OMP_NUM_THREADS, as training does, those of another one by the threads of its rates.

    Raises:
        ValueError: An unknown preset, a file that is no hardware description, or a key that the
            machine does not support.
        OSError: The file cannot be read.
    """
    hardware = _named_machine(run)
    parallel = run.parallel
    ranks = (
        parallel.data_parallel_degree
        * parallel.pipeline_parallel_degree
        * parallel.sequence_parallel_degree
    )
    if hardware.device.kind != "cpu":
        return hardware
    from sppo.hardware.this_machine import as_seen_by_ranks, detect_machine

    return as_seen_by_ranks(hardware, ranks, is_here=hardware.name == detect_machine().name)


def _named_machine(run: RunConfig) -> HardwareSpec:
    """Return the machine that the run file names, or this one."""
    config = run.hardware
    if config != "auto" and (config.file is not None or config.preset is not None):
        return hardware_for(config)
    from sppo.hardware.this_machine import detect_machine

    return hardware_for(config, this_machine=detect_machine())


def hardware_line(hardware: HardwareSpec) -> str:
    """Return one line with the machine's name, size, and the origin of its figures."""
    nodes, devices = hardware.num_nodes, hardware.node.num_devices
    size = f"{nodes} x {devices} devices" if nodes > 1 else f"{devices} devices"
    if hardware.num_devices == 1:
        size = "1 device"
    return f"{hardware.shown_name}, {size} (rates {hardware.provenance})"
