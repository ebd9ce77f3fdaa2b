"""NUMA node of a device, and processes bound to the node."""

import os
import subprocess
import sys

import pytest

from sppo.hardware import numa
from sppo.hardware.numa import NumaNode, node_of_pci_device, stay_near

ADDRESS = "0000:1b:00.0"


@pytest.fixture
def system(tmp_path):
    """Makes directories as Linux shows a machine: (devices, nodes)."""

    def make(*, nodes=2, numa_node="1", cores="00000000,00001030"):
        for index in range(nodes):
            (tmp_path / f"nodes/node{index}").mkdir(parents=True)
        device = tmp_path / "devices" / ADDRESS
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa_node}\n")
        (device / "local_cpus").write_text(f"{cores}\n")
        return {"devices": tmp_path / "devices", "nodes": tmp_path / "nodes"}

    return make


def test_the_node_of_a_device(system):
    where = system()
    assert node_of_pci_device(ADDRESS, **where) == NumaNode(1, frozenset({4, 5, 12}))
    assert node_of_pci_device("0000:99:00.0", **where) is None


@pytest.mark.parametrize(
    "machine",
    [
        {"nodes": 1, "numa_node": "0"},
        {"numa_node": "-1"},
        {"cores": "0"},
        {"cores": ""},
        {"cores": "all"},
    ],
    ids=str,
)
def test_machines_that_name_no_node(system, machine):
    assert node_of_pci_device(ADDRESS, **system(**machine)) is None


CODE = """
import ctypes, os, threading
from sppo.hardware.numa import _SYSTEM_CALLS, NumaNode, stay_near
import platform

def policy():
    found = ctypes.c_int(-1)
    _, number = _SYSTEM_CALLS[platform.machine()]
    ctypes.CDLL(None).syscall(number, ctypes.byref(found), None, 0, None, 0)
    return found.value

gate = threading.Event()
before = threading.Thread(target=gate.wait)
before.start()
core = min(os.sched_getaffinity(0))
kept = stay_near(NumaNode(0, frozenset({core, 9999})))
assert kept == NumaNode(0, frozenset({core})), kept
later = []
after = threading.Thread(target=lambda: later.extend([os.sched_getaffinity(0), policy()]))
after.start()
after.join()
assert os.sched_getaffinity(before.native_id) == os.sched_getaffinity(0) == later[0] == {core}
gate.set()
print(policy(), later[1])
"""


def test_threads_of_a_process_stay_and_prefer_memory_there():
    if not os.path.isdir("/sys/devices/system/node/node0"):
        pytest.skip("the system shows no NUMA nodes")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    policies = done.stdout.split()
    assert policies in (["1", "1"], ["-1", "-1"]), "preferred, or not allowed to ask"


def test_a_process_that_may_not_use_the_cores_still_prefers_the_memory(monkeypatch):
    """As of half of the tasks of srun, which spreads tasks over the sockets in turn."""
    before, preferred = os.sched_getaffinity(0), []
    monkeypatch.setattr(numa, "_prefer_memory_of", preferred.append)
    assert stay_near(NumaNode(1, frozenset({max(before) + 1}))) == NumaNode(1, frozenset())
    assert preferred == [1]
    assert os.sched_getaffinity(0) == before
