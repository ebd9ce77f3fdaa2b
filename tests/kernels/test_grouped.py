"""Products of experts with their rows, for every way in which rows may fall on experts."""

import pytest
import torch

from sppo.kernels import grouped
from sppo.kernels.elementwise import accumulation_dtype
from tests.kernels.operands import (
    DTYPES,
    TOLERANCE,
    Guarded,
    accumulation_tolerance,
    assert_close,
    dtype_name,
    random,
)
from tests.kernels.places import DEVICES, NO_GPU, need_triton

ROWS = {
    "some, none in between": (3, 0, 17, 1),
    "none at the ends": (0, 5, 9, 0),
    "all on one": (0, 0, 33, 0),
    "more than a tile": (70, 1, 130, 0),
}
"""Rows of each expert."""
SHAPES = [(23, 7), (1, 1), (136, 40)]
"""Outputs and inputs: no multiples of 8, single, and more than a tile."""


@pytest.fixture(params=["torch-cpu", "triton-cpu", pytest.param("cuda", marks=NO_GPU)])
def device(request, monkeypatch):
    if request.param == "triton-cpu":
        need_triton("cpu")
        monkeypatch.setattr(grouped, "fused", lambda x: True)
    return request.param.removeprefix("torch-").removeprefix("triton-")


def operands(counts, outputs, inputs, *, dtype, device):
    """The rows' dy and x, the weights, the ends of the experts' rows, and each row's expert."""
    rows, experts = sum(counts), len(counts)
    shapes = (rows, outputs), (rows, inputs), (experts, outputs, inputs)
    counts = torch.tensor(counts)
    ends = counts.cumsum(0).to(device, torch.int32)
    of_row = torch.arange(experts).repeat_interleave(counts)
    return *random(*shapes, dtype=dtype, device=device), ends, of_row


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_each_row_meets_the_weight_of_its_expert(counts, dtype, device):
    for shape in SHAPES:
        dy, x, weight, ends, of_row = operands(counts, *shape, dtype=dtype, device=device)
        whole = weight.cpu().double()[of_row]
        y = torch.einsum("roi,ri->ro", whole, x.cpu().double())
        dx = torch.einsum("roi,ro->ri", whole, dy.cpu().double())
        tolerance = 4 * TOLERANCE[dtype]
        assert_close(grouped.grouped_linear(x, weight, ends), y, tolerance=tolerance)
        assert_close(grouped.grouped_input_gradient(dy, weight, ends), dx, tolerance=tolerance)


@pytest.mark.parametrize("counts", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_weight_gradients_are_fp32_sums_of_the_rows_of_each_expert(counts, dtype, device):
    launched = grouped.fused(torch.empty(0, device=device))
    if launched and device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("triton's interpreter multiplies the bits of bf16 as integers")
    for outputs, inputs in SHAPES:
        dy, x, weight, ends, of_row = operands(counts, outputs, inputs, dtype=dtype, device=device)
        dy, x = Guarded(dy).inside, Guarded(x).inside
        total = weight.to(accumulation_dtype(dtype))
        one_hot = torch.nn.functional.one_hot(of_row, len(counts)).double()
        exact = dy.cpu().double(), x.cpu().double()
        product = torch.einsum("rx,ro,ri->xoi", one_hot, *exact)
        expected = total.cpu().double() + product
        before = total.clone()
        grouped.accumulate_grouped_weight_gradient_(total, dy, x, ends)
        tolerance = 4 * accumulation_tolerance(dtype) if launched else TOLERANCE[dtype]
        assert_close(total, expected, tolerance=tolerance)
        empty = [expert for expert, count in enumerate(counts) if not count]
        assert torch.equal(total[empty], before[empty])


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("inputs", [64, 68])
def test_torch_multiplies_what_it_takes_and_the_loop_the_rest(inputs, monkeypatch):
    """The same numbers, whether or not rows are at multiples of 16 bytes."""
    counts = (3, 0, 40, 1)
    _, x, weight, ends, _ = operands(counts, 64, inputs, dtype=torch.bfloat16, device="cuda")
    y = grouped.grouped_linear(x, weight, ends)
    monkeypatch.setattr(grouped, "_torch_multiplies", lambda left, right: False)
    looped = grouped.grouped_linear(x, weight, ends)
    assert_close(y, looped.double().cpu(), tolerance=TOLERANCE[torch.bfloat16])
