"""Layout of keys: by head in the CPU store, by token in the gradients that projections read."""

import torch

from sppo.kernels.attention.kv_layout import copy_by_token, empty_keys


def stored(dtype):
    keys = empty_keys(9, 3, 4, dtype=dtype, device="cpu")
    return keys.copy_(torch.arange(9 * 3 * 4).view(9, 3, 4))


def test_a_head_lies_together_unless_ranks_send_prefixes():
    assert stored(torch.float32).transpose(0, 1).is_contiguous()
    assert empty_keys(9, 3, 4, dtype=torch.float32, device="cpu", sent=True).is_contiguous()


def test_what_lies_by_token_is_copied_as_well():
    """The buffer it is a part of is used again while the copy still waits to be multiplied."""
    rows = torch.randn(9, 3, 4)
    found = copy_by_token(rows, dtype=torch.float32)
    assert torch.equal(found, rows)
    assert found.data_ptr() != rows.data_ptr()
