"""What is left to torch on a GPU."""

import logging
from unittest import mock

import pytest
import torch

from sppo.kernels import elementwise, fused
from sppo.kernels.norm_parameters import NormParameters
from tests.kernels.places import need_triton


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Every tensor counts as one on a GPU; the interpreter takes the launches."""
    need_triton("cpu")
    for module in (fused, elementwise):
        monkeypatch.setattr(module, "fused", lambda x: True)


def test_what_cannot_be_written_over_is_left_to_torch(as_on_a_gpu):
    up = torch.randn(6, 8, dtype=torch.float64)[:, ::2]
    dhidden = torch.ones_like(up)
    expected = elementwise.activation_backward_(dhidden.clone(), None, up.clone(), kind="gelu")
    inner = elementwise.activation_backward_(dhidden, None, up, kind="gelu")
    torch.testing.assert_close(inner.dup_CF, expected.dup_CF, rtol=1e-12, atol=1e-12)
    assert inner.hidden_CF is up


def test_a_sum_that_cannot_be_written_over_is_left_to_torch(as_on_a_gpu):
    total, x, weight = torch.randn(3, 6, 8, dtype=torch.float64)
    expected, total = total + x, total.repeat_interleave(2, 1)[:, ::2]
    parameters = NormParameters(weight[0], None, 1e-5)
    normed = elementwise.add_norm_(total, x, parameters)
    assert torch.equal(total, expected)
    torch.testing.assert_close(
        normed, elementwise.norm(expected, parameters), rtol=1e-12, atol=1e-12
    )


def test_without_a_working_triton_torch_serves_and_says_so(monkeypatch, caplog):
    pytest.importorskip("triton")
    from sppo.kernels.triton import activations

    broken = mock.Mock(side_effect=RuntimeError("Failed to find C compiler.\nPlease specify one"))
    monkeypatch.setattr(activations, "activation", broken)
    fused._triton_works.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not fused._triton_works(torch.device("cpu"))
        assert not fused._triton_works(torch.device("cpu"))
    fused._triton_works.cache_clear()
    assert [record.message.partition("does not: ")[2] for record in caplog.records] == [
        "RuntimeError: Failed to find C compiler."
    ]
