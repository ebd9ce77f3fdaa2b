import mmap

from sppo.kernels.native import process_memory
from sppo.kernels.native.process_memory import (
    peak_resident_bytes,
    reset_peak,
    resident_bytes,
)
from sppo.units import MIB


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
