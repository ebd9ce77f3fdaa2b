"""Degrees of parallelism that a run file leaves out, chosen for the ranks that train the run."""

from __future__ import annotations

from math import prod

from sppo.config import RunConfig
from sppo.config.run import DEGREES
from sppo.data.samples.step_lengths import drawn_steps_if_there
from sppo.parallel.job.environment import RankEnvironment
from sppo.planning.chosen_run import with_chosen_degrees
from sppo.training.devices.choose_device import choose_device, count_devices, machine_of_ranks


def ranks_to_divide(run: RunConfig, environment: RankEnvironment | None) -> int:
    """Return the number of ranks for which degrees are to be chosen; 0 if none is left to choose.

    These are the ranks that a launcher has started, or else one on each device of this machine; a
    CPU is one device.

    Args:
        run: Validated run configuration.
        environment: Place of this process among started ranks; None if there are none.
    """
    ranks = count_devices(run) if environment is None else environment.world_size
    written = prod(getattr(run.parallel, name) for name in DEGREES)  # those left out are 1
    return ranks if run.parallel.open_degrees and written < ranks else 0


def chosen_degrees(
    run: RunConfig, environment: RankEnvironment | None, *, ranks: int
) -> dict[str, int]:
    """Return the degrees that `run` leaves out, by name, as ``sppo solve`` chooses them.

    The choice is deterministic and independent of free memory, so all ranks choose alike, and so
    does a resumed run.

    Args:
        run: Validated run configuration.
        environment: Place of this process among started ranks; None if there are none.
        ranks: Number of ranks, of :func:`ranks_to_divide`.

    Raises:
        ValueError: The run asks for something that the machine or the model cannot do.
    """
    local_ranks = ranks if environment is None else environment.local_world_size
    device = choose_device(run, environment=environment)
    hardware = machine_of_ranks(run, device, num_ranks=ranks, local_ranks=local_ranks)
    whole = with_chosen_degrees(run, hardware=hardware, draw=drawn_steps_if_there).run
    return {name: getattr(whole.parallel, name) for name in run.parallel.open_degrees}
