"""Bytes held at the same time, and their peak."""

import torch

from sppo.offload.held_bytes import HeldBytes


def test_the_peak_is_of_one_moment():
    held = HeldBytes()
    held.add(10)
    held.add(-8)
    held.add_tensors([torch.zeros(2, dtype=torch.float32)])
    assert (held.now, held.peak) == (10, 10)
    held.remove_tensors([torch.zeros(2, dtype=torch.float32)])
    held.reset_peak()
    assert (held.now, held.peak) == (2, 2)
    held.clear()
    assert (held.now, held.peak) == (0, 2)
