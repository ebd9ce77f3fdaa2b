"""Number of files and connections that a rank opens, and the limit of them; loads no torch."""

from __future__ import annotations

import resource

_OPEN_FILES = 64
_CONNECTIONS_PER_RANK = 6
"""Measured with two and four ranks: 61 to 73 open files in all, 19 to 24 of them connections."""


def files_of_a_rank(num_ranks: int) -> int:
    """Files and connections that a rank of a job of so many opens, about."""
    return _OPEN_FILES + _CONNECTIONS_PER_RANK * num_ranks


def allow_connections(num_ranks: int) -> None:
    """Raise this process's limit of open files to the hard limit, and refuse one that is too low.

    Args:
        num_ranks: of the job.

    Raises:
        MemoryError: the hard limit is below what a rank opens.
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
