"""Degrees of parallelism that a run file leaves out, chosen for the ranks that train the run."""

from __future__ import annotations

from math import prod

from sppo.config import RunConfig
from sppo.data.samples.step_lengths import drawn_steps_if_there
from sppo.parallel.job.environment import RankEnvironment
from sppo.planning.chosen_run import DEGREES, open_degrees, with_chosen_degrees
from sppo.training.checks.preflight import machine_of_ranks
from sppo.training.devices.choose_device import choose_device, count_devices


def chosen_degrees(run: RunConfig, environment: RankEnvironment | None) -> dict[str, int]:
    """Return the degrees that `run` leaves out, by name, as ``sppo solve`` chooses them.

    They are chosen for the ranks that a launcher has started, or else for one rank on each device
    of this machine; a CPU is one device. Returns {} if nothing is left to choose. The choice is
    deterministic and does not depend on free memory: all ranks, and a resumed run, choose alike.

    Args:
        run: Validated run configuration.
        environment: Place of this process among started ranks; None if there are none.

    Raises:
        ValueError: The run asks for something that the machine or the model cannot do.
    """
    ranks = local_ranks = count_devices(run)
    if environment is not None:
        ranks, local_ranks = environment.world_size, environment.local_world_size
    names = open_degrees(run)
    written = prod(getattr(run.parallel, name) for name in DEGREES)  # those left out are 1
    if not names or written >= ranks:
        return {}
    device = choose_device(run, environment=environment)
    hardware = machine_of_ranks(run, device, num_ranks=ranks, local_ranks=local_ranks)
    whole = with_chosen_degrees(run, hardware=hardware, draw=drawn_steps_if_there).run
    return {name: getattr(whole.parallel, name) for name in names}
