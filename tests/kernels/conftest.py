"""Fixtures of kernel tests: the implementations of element-wise kernels, and one thread."""

import pytest
import torch

from sppo.kernels import cross_entropy, elementwise, fused, rotary, sinks
from sppo.kernels.attention import merged_output
from tests.kernels.operands import poison_fresh_memory
from tests.kernels.places import NO_GPU, need_triton


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    """With tensors this small a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(
    params=["torch-cpu", "triton-cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
)
def device(request, monkeypatch):
    """The device of tensors. On the CPU plain torch operations compute, or Triton's interpreter."""
    asked = []
    if request.param == "triton-cpu":
        need_triton("cpu")
        for module in (fused, elementwise, rotary, merged_output, cross_entropy, sinks):
            monkeypatch.setattr(module, "fused", lambda x: asked.append(x) or True)
    yield request.param.removeprefix("torch-").removeprefix("triton-")
    assert asked or request.param != "triton-cpu", "no kernel of Triton's was launched"


@pytest.fixture
def _fresh_memory_is_poisoned(monkeypatch):
    poison_fresh_memory(monkeypatch)
