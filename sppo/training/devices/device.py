"""What a run is trained on: the device of a process, the machine, and the degrees left open.

The trainer calls the same methods of a CPU and of a GPU instead of testing the kind of device.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sppo.config.run import RunConfig
from sppo.data.samples.label_share import with_label_share_if_there
from sppo.data.samples.step_lengths import drawn_steps_if_there
from sppo.hardware.description import DeviceKind, HardwareSpec
from sppo.hardware.run_hardware import hardware_for
from sppo.hardware.this_machine import as_seen_by_ranks
from sppo.parallel.job.environment import RankEnvironment
from sppo.planning.chosen_run import with_chosen_degrees
from sppo.training.devices.answering_gpus import answering_gpus
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.devices.cuda_device import CudaDevice, prepare_cuda

Device = CpuDevice | CudaDevice
"""Device of a rank."""


def device_kind(run: RunConfig) -> DeviceKind:
    """Return the kind of device that ``run`` is trained on here: a GPU unless it names a CPU."""
    if torch.version.cuda is not None:
        prepare_cuda()
    return "cuda" if torch.cuda.is_available() and _named_kind(run) != "cpu" else "cpu"


def _named_kind(run: RunConfig) -> DeviceKind | None:
    """Return the kind of device of the hardware that a run file names; None if it names none."""
    config = run.hardware
    if config == "auto" or (config.file is None and config.preset is None):
        return None
    return hardware_for(config).device.kind


def count_devices(run: RunConfig) -> int:
    """Return the number of devices of this machine on which ``run`` is trained; 1 for a CPU."""
    return 1 if device_kind(run) == "cpu" else torch.cuda.device_count()


def devices_here(run: RunConfig) -> tuple[int, ...]:
    """Return the devices of this machine on which ranks of ``run`` are trained, by number.

    A CPU counts once for each rank of the written degrees. With ``train.shrink`` a GPU counts if it
    answers.
    """
    if device_kind(run) == "cpu":
        return tuple(range(max(count_devices(run), run.parallel.written_ranks)))
    count = torch.cuda.device_count()
    return answering_gpus(count) if run.train.shrink else tuple(range(count))


def choose_device(run: RunConfig, *, environment: RankEnvironment | None = None) -> Device:
    """Return the device of one process of ``run``.

    Args:
        run: Validated run configuration.
        environment: Place of this process in the job; None if it trains alone.

    Raises:
        ValueError: See :func:`check_devices`.
    """
    local_rank, local_ranks = 0, 1
    if environment is not None:
        # srun may make only the task's own GPU visible to it.
        sees_one = environment.launcher == "slurm" and count_devices(run) == 1
        if not sees_one:
            local_rank, local_ranks = environment.local_rank, environment.local_world_size
    kind = check_devices(run, local_ranks=local_ranks)
    return CpuDevice() if kind == "cpu" else CudaDevice(torch.device("cuda", local_rank))


def check_devices(run: RunConfig, *, local_ranks: int) -> DeviceKind:
    """Return the kind of device of ``run``, if this machine has one for every rank on it.

    Raises:
        ValueError: The run names a GPU and there is none, or this machine has fewer GPUs than
            `local_ranks`.
    """
    if device_kind(run) == "cpu":
        if _named_kind(run) == "cuda":
            raise ValueError(_no_gpu(run))
        return "cpu"
    count = torch.cuda.device_count()
    if local_ranks > count:
        raise ValueError(
            f"{local_ranks} ranks on this machine, {count} GPU{'' if count == 1 else 's'}: every "
            "rank needs one of its own; lower the degrees of parallelism, write train.shrink=true "
            "to have them chosen for fewer GPUs, start ranks on more machines (torchrun, srun), or "
            "write hardware.preset=laptop-cpu to train on the CPU"
        )
    return "cuda"


def _no_gpu(run: RunConfig) -> str:
    named = hardware_for(run.hardware).name
    why = "was built without CUDA" if torch.version.cuda is None else "sees none"
    return (
        f"hardware: {named} is a GPU, and torch {torch.__version__} {why} here: write "
        "hardware.preset=laptop-cpu to train on the CPU, or install a torch with CUDA on a machine "
        "with a GPU; sppo solve and sppo simulate need none"
    )


def machine_of_ranks(
    run: RunConfig, device: Device, *, num_ranks: int, local_ranks: int
) -> HardwareSpec:
    """Return the hardware that the run names, or this machine, as the ranks of a job see it.

    Raises:
        ValueError: The hardware section cannot be used.
    """
    named = hardware_for(run.hardware, this_machine=device.machine())
    num_nodes = max(1, num_ranks // local_ranks)
    hardware = replace(named, num_nodes=num_nodes)
    if device.kind == "cuda":
        return replace(hardware, node=replace(hardware.node, num_devices=local_ranks))
    return as_seen_by_ranks(hardware, num_nodes * local_ranks, is_here=True)


def chosen_degrees(
    run: RunConfig, environment: RankEnvironment | None, *, ranks: int
) -> dict[str, int]:
    """Return the degrees that `run` leaves out, by name, as ``sppo solve`` chooses them.

    The choice is deterministic and independent of free memory, so all ranks choose alike, and so
    does a resumed run.

    Args:
        run: Validated run configuration.
        environment: Place of this process among started ranks; None if there are none.
        ranks: Number of ranks, one on each device.

    Raises:
        ValueError: The run asks for something that the machine or the model cannot do.
    """
    local_ranks = ranks if environment is None else environment.local_world_size
    device = choose_device(run, environment=environment)
    hardware = machine_of_ranks(run, device, num_ranks=ranks, local_ranks=local_ranks)
    run = with_label_share_if_there(run)
    whole, _ = with_chosen_degrees(run, hardware=hardware, draw=drawn_steps_if_there)
    return {name: getattr(whole.parallel, name) for name in run.parallel.open_degrees}
