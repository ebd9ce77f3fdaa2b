"""Memory that a process may use, under all limits together, and what it takes."""

import mmap
import resource
from unittest import mock

import pytest

from sppo.kernels.native import process_memory
from sppo.kernels.native.machine_memory import (
    MemoryRoom,
    address_room,
    check_room_for_libraries,
)
from sppo.kernels.native.process_memory import peak_resident_bytes, reset_peak, resident_bytes
from sppo.units import GIB, MIB


def test_the_room_is_the_least_of_all():
    assert MemoryRoom(5).least_bytes == 5
    assert MemoryRoom(5, control_group_bytes=3).least_bytes == 3
    assert MemoryRoom(5, control_group_bytes=-3).least_bytes == 0
    both = MemoryRoom(5, control_group_bytes=3)
    assert str(both) == "5 B available on the machine, 3 B left in the control group"
    assert str(MemoryRoom(GIB)) == "1.0 GiB available on the machine, no control group limit"


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


def touch(size):
    """That many bytes of resident memory for a moment."""
    with mmap.mmap(-1, size) as block:
        block.write(b"x" * size)


def test_the_peak_stays_until_it_is_reset():
    reset_peak()
    touch(64 * MIB)
    high = peak_resident_bytes()
    assert high >= resident_bytes() + 60 * MIB
    assert peak_resident_bytes() >= high
    reset_peak()
    assert peak_resident_bytes() <= high - 50 * MIB


def test_a_system_that_cannot_reset_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(process_memory, "_CLEAR", tmp_path / "no/clear_refs")
    monkeypatch.setattr(process_memory, "_STATUS", tmp_path / "no/status")
    reset_peak()
    assert peak_resident_bytes() > MIB
