"""Page-locked chunks on a GPU: copies across the border between two of them."""

import psutil
import pytest
import torch

from sppo.offload import page_lock
from sppo.offload.cuda_lane import copy_in_pieces
from sppo.offload.locked_arena import LockedArena
from sppo.offload.page_lock import CHUNK_BYTES, PIECE_BYTES
from sppo.units import GIB

ROOM = 1.2
"""Free host memory over the memory to lock, at least."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk_bytes", [GIB, CHUNK_BYTES], ids=["1 GiB", "64 GiB"])
def test_copies_cross_the_border_of_two_chunks(chunk_bytes, monkeypatch):
    size = min(2 * chunk_bytes, chunk_bytes + 8 * GIB)
    if psutil.virtual_memory().available < ROOM * size:
        pytest.skip(f"needs {ROOM * size / GIB:.0f} GiB of free host memory")
    monkeypatch.setattr(page_lock, "CHUNK_BYTES", chunk_bytes)
    torch.cuda.init()
    arena = LockedArena(torch.cuda.cudart())
    memory = arena.memory(size)
    try:
        border = [end for _, end in page_lock.spans(memory, most_bytes=chunk_bytes)][0]
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
