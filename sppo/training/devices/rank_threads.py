"""Threads with which a rank on a GPU computes on the CPU, where the optimizer may step."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sppo.parallel.job.environment import RankEnvironment

_THREADS = "OMP_NUM_THREADS"


def threads_of_gpu_rank(
    environment: RankEnvironment,
    *,
    cores: int,
    ranks_near: int,
    allowed_cores: int,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Return OMP_NUM_THREADS if the user has set it, or the rank's share of its cores.

    torchrun sets OMP_NUM_THREADS=1 unless it is set, which cannot be told from a 1 that the user
    sets. Ranks that update on the CPU would be several times slower, so that 1 counts as not set.

    Args:
        environment: Place of the rank in its job.
        cores: Cores that the rank uses.
        ranks_near: Ranks of this machine that would use the same cores. Tasks to which srun gives
            cores of their own share none.
        allowed_cores: Cores that the launcher allows the rank to use.
        environ: Environment variables.
    """
    launcher = environment.launcher
    given = environ.get(_THREADS, "").split(",")[0].strip()
    if given.isdecimal() and int(given) > (launcher == "torchrun"):
        return min(int(given), cores)
    of_node = environ.get("SLURM_CPUS_ON_NODE", "")
    has_own = (
        launcher == "slurm"
        and of_node.isdecimal()
        and allowed_cores * environment.local_world_size <= int(of_node)
    )
    return max(1, cores if has_own else cores // ranks_near)
