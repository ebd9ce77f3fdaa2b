"""One thread, and Triton's kernels under its interpreter where there is no GPU to run them."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    """On tensors this small a second one only waits, badly so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
