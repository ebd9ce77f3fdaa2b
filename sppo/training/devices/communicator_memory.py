"""Device memory that NCCL takes for communicators, compared with the plan."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.parallel.mesh import Mesh
from sppo.training.devices.device import Device
from sppo.units import format_bytes

_log = logging.getLogger(__name__)


@contextmanager
def communicators_measured(mesh: Mesh, *, device: Device, planned: MemoryBuckets) -> Iterator[None]:
    """Measure the device memory of communicators that the context connects, if NCCL carries them.

    Args:
        mesh: Mesh whose groups are connected in the context.
        device: Device of this rank, on which torch allocates little in the context.
        planned: Memory of the rank's device in the plan.

    Raises:
        MemoryError: The memory that is left is less than the plan needs beside communicators.
    """
    if not mesh.uses_nccl:
        yield
        return
    before = device.free_bytes(local_ranks=1)
    yield
    left = device.free_bytes(local_ranks=1)
    taken, expected = before - left, planned.communicators_bytes
    needed = planned.total_bytes - expected
    found = (
        f"NCCL's communicators take {format_bytes(max(0, taken))} of the device, planned "
        f"{format_bytes(expected)}"
    )
    remedy = (
        "set NCCL_BUFFSIZE=2097152 in the environment of every rank (half of NCCL's largest "
        "buffers), or solve again with a larger hardware.margin"
    )
    if needed > left:
        raise MemoryError(
            f"{found}; the plan needs {format_bytes(needed)} beside them, and {format_bytes(left)} "
            f"are left: {remedy}, or with parallel.multiplexed=off if it is on"
        )
    if taken > expected:
        _log.warning("%s: if memory runs out, %s", found, remedy)
    else:
        _log.info("%s", found)
