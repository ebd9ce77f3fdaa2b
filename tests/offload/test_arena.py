"""Host arena: exactly the planned bytes, safe views, clear errors."""

import ctypes
import mmap
import re
from unittest import mock

import pytest
import torch

from sppo.kernels.native.machine_memory import MemoryRoom
from sppo.offload import arena as arena_module
from sppo.offload.arena import HostArena

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def resident_pages(address, size_bytes):
    """Exact for anonymous memory, unlike the counters of the whole process."""
    pages = -(-size_bytes // PAGE)
    found = (ctypes.c_ubyte * pages)()
    code = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), found
    )
    assert code == 0, ctypes.get_errno()
    return sum(byte & 1 for byte in found)


def is_mapped(address):
    found = (ctypes.c_ubyte * 1)()
    return not ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), found)


@pytest.mark.parametrize("threads", [1, 3, 200])
@pytest.mark.parametrize("size", [1, PAGE, PAGE + 1, 2 * MIB, 5 * MIB + 12345])
def test_every_planned_byte_is_resident_and_zero(monkeypatch, size, threads):
    monkeypatch.setattr(arena_module, "_usable_cores", lambda: threads)
    arena = HostArena(size)
    assert arena.size_bytes == size
    whole = arena.tensor(0, (size,), torch.uint8)
    assert whole.data_ptr() % PAGE == 0
    assert resident_pages(whole.data_ptr(), size) == -(-size // PAGE)
    assert not whole.any()


def test_an_arena_grows_where_it_is(monkeypatch):
    arena = HostArena(1 << 30, resident_bytes=0)
    assert resident_pages(arena.address, 4 * MIB) == 0
    for size in (1, MIB, MIB, 3 * MIB + 1):
        arena.make_resident(size)
        assert resident_pages(arena.address, 4 * MIB) >= size // PAGE
        arena.tensor(0, (size,), torch.uint8).fill_(255)
    monkeypatch.setattr(arena_module, "memory_room", lambda: MemoryRoom(MIB))
    with pytest.raises(MemoryError, match=r"a host arena of 4\.0 MiB does not fit: 1\.0 MiB avail"):
        arena.make_resident(7 * MIB + PAGE)


def test_views_share_the_memory_and_nothing_else():
    arena = HostArena(MIB)
    whole = arena.tensor(0, (MIB // 4,), torch.float32)
    part = arena.tensor(4096, (3, 5), torch.float32)
    part.copy_(torch.arange(15.0).view(3, 5))
    assert torch.equal(whole[1024:1039], torch.arange(15.0))
    assert whole.count_nonzero() == 14
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == 60
    assert whole._version == 0  # writing a part is no news to what autograd saved elsewhere
    assert arena.tensor(4096, (15,), torch.float32).data_ptr() == part.data_ptr()


def test_the_bounds_are_the_planned_ones():
    size = PAGE + 64
    arena = HostArena(size)
    assert arena.tensor(PAGE, (16,), torch.float32).numel() == 16
    assert arena.tensor(size, (0,), torch.float32).numel() == 0
    past = rf"bytes {PAGE} to {PAGE + 68} are not within the arena's {size}"
    with pytest.raises(AssertionError, match=past):
        arena.tensor(PAGE, (17,), torch.float32)
    for offset, shape in ((2 * PAGE, (0,)), (-64, (1,)), (0, (1 << 40, 1 << 40)), (0, (-1,))):
        with pytest.raises(AssertionError, match="not within"):
            arena.tensor(offset, shape, torch.float32)
    with pytest.raises(AssertionError, match="offset 32 is not aligned"):
        arena.tensor(32, (1,), torch.float32)


def test_the_memory_goes_with_the_last_view():
    arena = HostArena(MIB)
    first = arena.tensor(0, (PAGE,), torch.uint8)
    rows = arena.tensor(PAGE, (4, 16), torch.float32)[1:3].t()
    address = first.data_ptr()
    del arena
    rows.fill_(2.0)
    assert rows.sum() == 64.0
    del first
    assert is_mapped(address)
    del rows
    assert not is_mapped(address)


def test_what_does_not_fit_is_refused_before_it_is_mapped(monkeypatch):
    never = mock.Mock(side_effect=AssertionError("mapped"))
    room = MemoryRoom(8 * MIB, control_group_bytes=2 * MIB)
    monkeypatch.setattr(arena_module, "memory_room", lambda: room)
    monkeypatch.setattr(arena_module, "_map", never)
    message = (
        "a host arena of 3.0 MiB does not fit: 8.0 MiB available on the machine, "
        "2.0 MiB left in the control group"
    )
    with pytest.raises(MemoryError, match=re.escape(message)):
        HostArena(3 * MIB)


@pytest.mark.parametrize("size", [1 << 60, (1 << 63) - 1, 1 << 63])
def test_a_mapping_that_fails_is_told(monkeypatch, size):
    monkeypatch.setattr(arena_module, "memory_room", lambda: MemoryRoom(1 << 64))
    with pytest.raises(MemoryError, match="the system refuses to map a host arena of .*TiB"):
        HostArena(size)
