"""Page-locked memory: in chunks that the driver takes, each byte once, and no copy across two."""

import mmap
import random

import numpy as np
import psutil
import pytest
import torch

from sppo.offload import cuda_lane, page_lock
from sppo.offload.cuda_lane import copy_in_pieces
from sppo.offload.page_lock import (
    CHUNK_BYTES,
    PIECE_BYTES,
    LockedArena,
    lock_pages,
    spans,
    unlock_pages,
)
from sppo.units import GIB
from tests.offload.test_cuda_lane import on_gpu, runtime_without_a_gpu

_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which the mmap of later versions of Python has."""
_PIECE = 256
"""In place of 32 MiB, so that a chunk has 1 KiB."""


@pytest.fixture
def large():
    """600 GiB of addresses; nothing touches them."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, 600 * GIB, flags=flags), dtype=np.uint8))


def test_what_one_call_cannot_lock_is_locked_in_chunks(large):
    runtime = runtime_without_a_gpu()
    memory = large[12345:]  # an address that is no multiple of anything
    lock_pages(runtime.cudart(), memory)
    assert sum(runtime.locked_sizes) == memory.nbytes
    assert max(runtime.locked_sizes) <= CHUNK_BYTES
    chosen = random.Random(0)
    for border in sorted(runtime.locked):
        begin = border - memory.data_ptr() - chosen.randrange(PIECE_BYTES)
        copied = memory[max(0, begin) :][: 3 * PIECE_BYTES]
        for first, end in spans(copied, most_bytes=PIECE_BYTES):
            assert not runtime.spans_two(copied.data_ptr() + first, end - first)
    unlock_pages(runtime.cudart(), memory)
    assert not runtime.locked


def test_a_chunk_that_the_driver_refuses_unlocks_the_others(large, monkeypatch):
    runtime = runtime_without_a_gpu()
    cudart = runtime.cudart()
    register = cudart.cudaHostRegister
    cudart.cudaHostRegister = lambda *chunk: 2 if len(runtime.locked) == 3 else register(*chunk)
    refused = r"NVIDIA driver refuses to page-lock 64.0 GiB of host memory, 600.0 GiB in all"
    with pytest.raises(MemoryError, match=refused):
        lock_pages(cudart, large)
    assert len(runtime.locked_sizes) == 3
    assert not runtime.locked


@pytest.mark.parametrize("seed", range(3))
def test_memory_grows_in_place_and_no_copy_spans_two_locked_ranges(seed, monkeypatch):
    for module in (page_lock, cuda_lane):
        monkeypatch.setattr(module, "PIECE_BYTES", _PIECE)
    monkeypatch.setattr(page_lock, "CHUNK_BYTES", 4 * _PIECE)
    runtime, chosen = runtime_without_a_gpu(), random.Random(seed)
    copy = torch.Tensor.copy_

    def checked(target, source, **how):
        for tensor in (target, source):
            assert not runtime.spans_two(tensor.data_ptr(), tensor.nbytes)
        return copy(target, source, **how)

    arena = LockedArena(runtime.cudart(), most_bytes=1 << 16)
    address = arena.memory(1).data_ptr()
    for size in sorted(chosen.randrange(1, 1 << 16) for _ in range(8)):
        memory = arena.memory(size)
        assert memory.data_ptr() == address
        assert memory.nbytes == size
        assert size <= sum(runtime.locked_sizes) < size + _PIECE
        for _ in range(8):
            begin, end = sorted(chosen.choices(range(size + 1), k=2))
            sent = torch.randint(256, (end - begin,), dtype=torch.uint8)
            back, part = torch.zeros_like(sent), memory[begin:end]
            with monkeypatch.context() as patched:
                patched.setattr(torch.Tensor, "copy_", checked)
                copy_in_pieces(part, sent, host=part)
                copy_in_pieces(back, part, host=part)
            assert torch.equal(back, sent)
    arena.release()
    assert not runtime.locked


def test_more_than_expected_is_mapped_anew():
    runtime = runtime_without_a_gpu()
    arena = LockedArena(runtime.cudart(), most_bytes=4096)
    arena.memory(4096)
    larger = arena.memory(3 * 4096)
    assert runtime.locked == {larger.data_ptr()}


ROOM = 1.2
"""Free host memory over the memory to lock, at least."""


@pytest.mark.parametrize("chunk_bytes", [GIB, CHUNK_BYTES], ids=["1 GiB", "64 GiB"])
@on_gpu
def test_copies_cross_the_border_of_two_chunks(chunk_bytes, monkeypatch):
    size = min(2 * chunk_bytes, chunk_bytes + 8 * GIB)
    if psutil.virtual_memory().available < ROOM * size:
        pytest.skip(f"needs {ROOM * size / GIB:.0f} GiB of free host memory")
    monkeypatch.setattr(page_lock, "CHUNK_BYTES", chunk_bytes)
    torch.cuda.init()
    arena = LockedArena(torch.cuda.cudart())
    memory = arena.memory(size)
    try:
        border = [end for _, end in spans(memory, most_bytes=chunk_bytes)][0]
        assert border < size
        host = memory[border - PIECE_BYTES - 7 : border + 2 * PIECE_BYTES + 5]
        sent = torch.randint(256, (host.numel(),), dtype=torch.uint8, device="cuda")
        copy_in_pieces(host, sent, host=host)
        torch.cuda.synchronize()
        back = torch.zeros_like(sent)
        copy_in_pieces(back, host, host=host)
        torch.cuda.synchronize()
        assert torch.equal(back, sent)
        assert torch.equal(host, sent.cpu())
    finally:
        arena.release()
