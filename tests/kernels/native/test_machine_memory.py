"""Memory that a process may use: limits of control groups of both versions, and of a NUMA node."""

from __future__ import annotations

import resource
from pathlib import Path
from unittest import mock

import psutil
import pytest

from sppo.kernels.native.machine_memory import (
    MemoryRoom,
    address_room,
    check_room_for_libraries,
    control_group_room,
    memory_room,
)

GIB = 1 << 30


def group_v2(path: Path, *, limit: int | str, current: int, files: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{current}\n")
    (path / "memory.stat").write_text(f"anon 1\nactive_file {files}\ninactive_file {files}\n")


def group_v1(path: Path, *, limit: int, current: int, files: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (path / "memory.usage_in_bytes").write_text(f"{current}\n")
    stat = f"active_file 7\ntotal_active_file {files}\ntotal_inactive_file {files}\n"
    (path / "memory.stat").write_text(stat)


def room(tmp_path: Path, membership: str) -> int | None:
    (tmp_path / "membership").write_text(membership)
    return control_group_room(membership=tmp_path / "membership", cgroups=tmp_path / "cgroup")


def test_the_strictest_group_above_the_process_holds(tmp_path):
    top = tmp_path / "cgroup"
    group_v2(top / "a/b/c", limit="max", current=5 * GIB)
    group_v2(top / "a/b", limit=8 * GIB, current=6 * GIB, files=GIB // 2)
    group_v2(top / "a", limit=6 * GIB, current=4 * GIB)
    group_v2(top / "other", limit=1, current=0)
    assert room(tmp_path, "0::/a/b/c\n") == 2 * GIB
    group_v2(top / "a/b", limit=8 * GIB, current=6 * GIB)
    group_v2(top / "a", limit=9 * GIB, current=6 * GIB)
    assert room(tmp_path, "0::/a/b/c\n") == 2 * GIB


def test_groups_of_version_1(tmp_path):
    top = tmp_path / "cgroup/memory"
    group_v1(top, limit=9223372036854771712, current=5 * GIB)
    group_v1(top / "job", limit=4 * GIB, current=3 * GIB, files=GIB // 4)
    membership = "8:pids:/job\n4:cpu,memory:/job\n0::/\n"
    assert room(tmp_path, membership) == GIB + GIB // 2
    assert room(tmp_path, "4:memory:/\n0::/\n") is None


def test_a_container_sees_its_own_group_at_the_top(tmp_path):
    group_v1(tmp_path / "cgroup/memory", limit=4 * GIB, current=GIB)
    assert room(tmp_path, "4:memory:/path/on/the/host\n") == 3 * GIB


def test_no_groups_no_limit(tmp_path):
    assert room(tmp_path, "0::/a\n") is None
    assert control_group_room(membership=tmp_path / "none") is None


def test_the_room_is_the_least_of_all():
    assert MemoryRoom(5).least_bytes == 5
    assert MemoryRoom(5, control_group_bytes=3).least_bytes == 3
    assert MemoryRoom(5, control_group_bytes=-3).least_bytes == 0
    both = MemoryRoom(5, control_group_bytes=3)
    assert str(both) == "5 B available on the machine, 3 B left in the control group"
    assert str(MemoryRoom(GIB)) == "1.0 GiB available on the machine, no control group limit"


def test_this_machine_has_room():
    found = memory_room()
    assert 0 < found.least_bytes <= psutil.virtual_memory().total


def test_processes_share_memory_and_have_addresses_of_their_own():
    shared = MemoryRoom(machine_bytes=8 * GIB, control_group_bytes=6 * GIB, address_bytes=2 * GIB)
    assert shared.least_bytes == 2 * GIB
    assert shared.share_bytes(6) == GIB
    assert "2.0 GiB of addresses left by ulimit" in str(shared)


def test_addresses_are_what_the_limit_leaves(tmp_path, monkeypatch):
    status = tmp_path / "status"
    status.write_text("VmPeak:\t 9 kB\nVmSize:\t 1048576 kB\nVmData:\t 524288 kB\n")
    limits = {resource.RLIMIT_AS: 4 * GIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (limits[limit], limits[limit]))
    assert address_room(status=status) == 3 * GIB
    limits[resource.RLIMIT_DATA] = GIB
    assert address_room(status=status) == GIB // 2
    limits.update(dict.fromkeys(limits, resource.RLIM_INFINITY))
    assert address_room(status=status) is None


def test_libraries_that_do_not_fit_are_refused():
    rooms = {
        "training in 3 processes needs 720.0 MiB for libraries alone": MemoryRoom(700 << 20),
        "ulimit -v": MemoryRoom(8 * GIB, address_bytes=GIB // 2),
    }
    for said, little in rooms.items():
        with (
            mock.patch(
                "sppo.kernels.native.machine_memory.memory_room", lambda little=little: little
            ),
            pytest.raises(MemoryError, match=said),
        ):
            check_room_for_libraries(processes=3)
