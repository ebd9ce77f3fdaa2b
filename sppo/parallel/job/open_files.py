"""Number of files and connections that a rank opens, and their limit; without torch."""

from __future__ import annotations

import resource

_OPEN_FILES = 64
_CONNECTIONS_PER_RANK = 6
"""Measured with two and four ranks: 61 to 73 open files, of which 19 to 24 are connections."""


def files_of_a_rank(num_ranks: int) -> int:
    """Return about how many files and connections a rank of a job of ``num_ranks`` opens."""
    return _OPEN_FILES + _CONNECTIONS_PER_RANK * num_ranks


def allow_connections(num_ranks: int) -> None:
    """Raise this process's limit of open files to the hard limit.

    Args:
        num_ranks: Number of ranks of the job.

    Raises:
        MemoryError: The hard limit is below the number of files that a rank opens.
    """
    needed = files_of_a_rank(num_ranks)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = hard if hard != unlimited else max(soft, 2 * needed)
    if soft not in (most, unlimited):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if soft != unlimited and most < needed:
        raise MemoryError(
            f"a rank of {num_ranks} opens about {needed} files and connections, and this process "
            f"may open {most}: raise that limit (ulimit -n)"
        )
