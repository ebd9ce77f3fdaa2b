"""Peaks of torch's CPU tensors, as the memory pool counts them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sppo.engine.engine import Engine
from sppo.engine.unit import SequenceData
from sppo.kernels.native.cpu_allocator import install_cpu_allocator


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of torch: scratch of kernels depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peak_beyond(function: Callable[[], Any]) -> tuple[int, Any]:
    """Peak of a call beyond what is there before, and what the call returns."""
    allocator = install_cpu_allocator()
    if allocator is None:
        pytest.skip("torch's CPU tensors live in the C heap here")
    gc.collect()  # engines of earlier tests, which would go during the call
    before = allocator.memory().used_bytes
    allocator.reset_peak()
    kept = function()
    return allocator.memory().used_peak_bytes - before, kept


def peak_of_step(engine: Engine, data: SequenceData, cuts: Any) -> int:
    """Peak of a step on two threads, after a first step that builds what stays."""
    with threads(2):
        engine.accumulate([data], [cuts])
        return peak_beyond(lambda: engine.accumulate([data], [cuts]))[0]
