"""The NUMA node that a PCI device hangs at, and how a process stays there.

Copies between a GPU and the memory of another node cross the link between processors, which all
GPUs of a node share. A process that computes on one GPU keeps its threads on the cores next to it,
and prefers memory there: what it maps from then on, page-locked memory above all, lies on that node
as long as it has room. A user who has chosen either is left alone.
"""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sppo.hardware.this_machine import count_numa_nodes

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")
_TASKS = Path("/proc/self/task")
_SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""Numbers of set_mempolicy and get_mempolicy by machine; the C library has no functions."""
_DEFAULT_POLICY, _PREFERRED_POLICY = 0, 1
_MOST_NODES = 64


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A memory domain of the machine.

    Attributes:
        index: Its number.
        cores: Those next to its memory.
    """

    index: int
    cores: frozenset[int]


def node_of_pci_device(
    address: str, *, devices: Path = _PCI_DEVICES, nodes: Path = _NODES
) -> NumaNode | None:
    """Return the node of a device; None where the machine has one alone, or does not say.

    Args:
        address: of the device, e.g. ``0000:1b:00.0``.
        devices: directory of the system's PCI devices.
        nodes: directory of the system's NUMA nodes.
    """
    if count_numa_nodes(nodes=nodes) == 1:
        return None
    try:
        index = int((devices / address / "numa_node").read_text())
        cores = cores_in((devices / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return None
    return NumaNode(index, cores) if index >= 0 and cores else None


def cores_in(text: str) -> frozenset[int]:
    """Return the cores of a list as Linux writes it, e.g. 0, 1, 2 and 8 of ``0-2,8``.

    Raises:
        ValueError: not such a list.
    """
    cores: set[int] = set()
    for item in filter(None, text.strip().split(",")):
        first, _, last = item.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def stay_near(node: NumaNode) -> NumaNode | None:
    """Keep all threads of this process next to a node, and prefer memory there.

    Returns:
        The node with the cores that the process keeps, None if it may use none of them.
    """
    allowed = os.sched_getaffinity(0) & node.cores
    if not allowed:
        return None
    for task in _TASKS.iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            os.sched_setaffinity(int(task.name), allowed)
    _prefer_memory_of(node.index)
    return NumaNode(node.index, frozenset(allowed))


def _prefer_memory_of(index: int) -> None:
    """Take memory from node ``index`` while there is some, in this thread and those it starts.

    Does nothing where the system does not allow it, or somebody has set a policy (numactl).
    """
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None or index >= _MOST_NODES:
        return
    set_policy, get_policy = numbers
    library = ctypes.CDLL(None)
    policy = ctypes.c_int(-1)
    asked = library.syscall(get_policy, ctypes.byref(policy), None, 0, None, 0)
    if asked != 0 or policy.value != _DEFAULT_POLICY:
        return
    mask = ctypes.c_ulong(1 << index)
    # The kernel reads one bit less than it is told of.
    library.syscall(set_policy, _PREFERRED_POLICY, ctypes.byref(mask), _MOST_NODES + 1)
