"""Binding of a process to the NUMA node of its GPU.

Copies between a GPU and the memory of another NUMA node cross the link between processors, which
all GPUs of a machine share. A process that computes on one GPU therefore keeps its threads on the
cores next to the GPU and prefers memory of their node: memory that it maps afterwards, page-locked
memory above all, lies on that node while it has room. A memory policy that the user has set is not
changed, and threads stay within the cores that the user allows, even if none is next to the GPU.
"""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo.hardware.this_machine import count_numa_nodes

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")
_TASKS = Path("/proc/self/task")
_SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""System call numbers of set_mempolicy and get_mempolicy; the C library wraps neither."""
_DEFAULT_POLICY, _PREFERRED_POLICY = 0, 1
_MOST_NODES = 64


@dataclass(frozen=True, slots=True)
class NumaNode:
    """NUMA node of the machine.

    Attributes:
        index: Number that the system gives the node.
        cores: Cores next to the node's memory.
    """

    index: int
    cores: frozenset[int]


def node_of_pci_device(
    address: str, *, devices: Path = _PCI_DEVICES, nodes: Path = _NODES
) -> NumaNode | None:
    """Return the NUMA node of a PCI device.

    Args:
        address: PCI address of the device, e.g. ``0000:1b:00.0``.
        devices: Directory of the system's PCI devices.
        nodes: Directory of the system's NUMA nodes.

    Returns:
        The node, or None if the machine has a single node or does not tell the device's.
    """
    if count_numa_nodes(nodes=nodes) == 1:
        return None
    try:
        index = int((devices / address / "numa_node").read_text())
        mask = int((devices / address / "local_cpus").read_text().replace(",", ""), 16)
    except (OSError, ValueError):
        return None
    cores = frozenset(core for core in range(mask.bit_length()) if mask >> core & 1)
    return NumaNode(index, cores) if index >= 0 and cores else None


def pci_address(properties: Any) -> str:
    """Return the address by which Linux names a GPU, e.g. ``0000:1b:00.0``.

    Args:
        properties: Result of ``torch.cuda.get_device_properties``.
    """
    domain, bus = properties.pci_domain_id, properties.pci_bus_id
    return f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"


def stay_near(node: NumaNode) -> NumaNode:
    """Bind all threads of this process to the cores of `node`, and prefer memory of `node`.

    If the process may use no core of `node`, its threads stay where they are. Copies to and from
    memory next to the GPU are then still faster than to and from memory next to the threads.

    Returns:
        The node with the cores that the process keeps; none if it may use no core of `node`.
    """
    _prefer_memory_of(node.index)
    allowed = os.sched_getaffinity(0) & node.cores
    if allowed:
        for task in _TASKS.iterdir():
            with suppress(OSError):  # The thread may have ended.
                os.sched_setaffinity(int(task.name), allowed)
    return NumaNode(node.index, frozenset(allowed))


def _prefer_memory_of(index: int) -> None:
    """Prefer memory of node ``index`` in this thread and the threads that it starts.

    Does nothing where the system does not allow it, or where a policy is already set (numactl).
    """
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None or index >= _MOST_NODES:
        return
    set_policy, get_policy = numbers
    system, policy = ctypes.CDLL(None), ctypes.c_int(-1)
    code = system.syscall(get_policy, ctypes.byref(policy), None, 0, None, 0)
    if code == 0 and policy.value == _DEFAULT_POLICY:
        nodes = ctypes.c_ulong(1 << index)
        # The kernel reads one bit less than the given number.
        system.syscall(set_policy, _PREFERRED_POLICY, ctypes.byref(nodes), _MOST_NODES + 1)
