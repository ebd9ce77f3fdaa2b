import mmap

import pytest

from sppo.train import process_memory
from sppo.train.process_memory import (
    available_bytes,
    peak_resident_bytes,
    reset_peak,
    resident_bytes,
)
from sppo.units import GIB, MIB


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


class Machine:
    """Control groups in a directory."""

    def __init__(self, path, monkeypatch):
        self.path = path
        monkeypatch.setattr(process_memory, "_CGROUPS", path / "cgroup")
        monkeypatch.setattr(process_memory, "_MEMBERSHIP", path / "membership")
        memory = type("Memory", (), {"available": 10 * GIB})
        monkeypatch.setattr(process_memory.psutil, "virtual_memory", lambda: memory)

    def member_of(self, name):
        (self.path / "membership").write_text(f"12:pids:/old\n0::{name}\n")

    def group(self, name, *, limit, current, cached=0):
        directory = self.path / "cgroup" / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text(f"{current}\n")
        half = cached // 2
        text = f"anon 5\nactive_file {half}\ninactive_file {cached - half}\nfile_mapped 3\n"
        (directory / "memory.stat").write_text(text)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_without_groups_the_machine_counts(machine):
    assert available_bytes() == 10 * GIB


def test_a_group_without_a_limit(machine):
    machine.group("", limit="max", current=GIB)
    assert available_bytes() == 10 * GIB


def test_a_container_sees_its_own_group_as_the_root(machine):
    machine.member_of("/")
    machine.group("", limit=4 * GIB, current=GIB)
    assert available_bytes() == 3 * GIB


def test_files_in_the_cache_make_way(machine):
    machine.group("", limit=4 * GIB, current=4 * GIB, cached=3 * GIB)
    assert available_bytes() == 3 * GIB


def test_the_tightest_of_nested_groups_holds(machine):
    machine.member_of("/jobs/7/step")
    machine.group("jobs/7/step", limit="max", current=0)
    machine.group("jobs/7", limit=3 * GIB, current=GIB)
    machine.group("jobs", limit=8 * GIB, current=GIB)
    assert available_bytes() == 2 * GIB
    machine.group("jobs/7/step", limit=GIB, current=0)
    assert available_bytes() == GIB


def test_a_group_that_is_full_leaves_nothing(machine):
    machine.group("", limit=GIB, current=2 * GIB)
    assert available_bytes() == 0


def test_a_group_larger_than_the_machine(machine):
    machine.group("", limit=64 * GIB, current=0)
    assert available_bytes() == 10 * GIB


def test_a_group_that_cannot_be_read(machine):
    machine.group("", limit=GIB, current="what")
    assert available_bytes() == 10 * GIB


def test_on_this_machine():
    assert MIB < available_bytes() < 1 << 50
