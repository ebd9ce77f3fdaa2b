"""Bytes held at the same time: parts count as the whole tensor, and peaks are of one moment."""

import torch

from sppo.offload.held_bytes import HeldBytes


def test_the_peak_of_a_whole_is_not_the_sum_of_the_peaks_of_its_parts():
    whole = HeldBytes()
    first, second = HeldBytes(whole), HeldBytes(whole)
    first.add(10)
    first.add(-8)
    second.add_tensors([torch.zeros(2, dtype=torch.float32)])
    assert (whole.now, whole.peak) == (10, 10)
    assert (first.peak, second.peak) == (10, 8)
    second.remove_tensors([torch.zeros(2, dtype=torch.float32)])
    whole.reset_peak()
    assert (whole.now, whole.peak, second.peak) == (2, 2, 8)


def test_what_is_cleared_is_subtracted_from_the_whole_once():
    whole = HeldBytes()
    part = HeldBytes(whole)
    inner = HeldBytes(part)
    part.add(5)
    inner.add(3)
    inner.clear()
    part.clear()
    assert (whole.now, part.now, inner.now) == (0, 0, 0)
