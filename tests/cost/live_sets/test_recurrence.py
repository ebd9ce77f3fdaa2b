"""Predicted live sets of the recurrence of linear attention against its tensors."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sppo.config.model import ModelConfig
from sppo.cost.layer_kinds import layer_kinds
from sppo.cost.live_sets.recurrence_live_sets import recurrence_backward, recurrence_forward
from sppo.cost.live_sets.tensor_sizes import TensorSizes
from sppo.cost.trainable import EVERYTHING
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS
from sppo.model.recurrence import Recurrence, State
from sppo.training.state import DTYPES


class LiveTensors(TorchDispatchMode):
    """Most bytes of the storages that operations returned and that were live at once."""

    def __init__(self, operands):
        super().__init__()
        self.live = {x.untyped_storage()._cdata: 0 for x in operands}
        self.peak_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))
        return found


def peak_bytes(function, operands):
    with torch.no_grad(), LiveTensors(operands) as tensors:
        function()
    return tensors.peak_bytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (4096, {"key_heads": 2, "value_heads": 6}),
        (5000, {"key_heads": 2, "value_heads": 4}),
        (4096, {"key_heads": 4, "value_heads": 4, "value_size": 64}),
    ],
)
def test_a_tile_takes_what_is_planned(tokens, sizes, dtype):
    model = ModelConfig(
        vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, mlp_size=64,
        layer_types=["full", "linear"], linear_attention=sizes,
    )  # fmt: skip
    kind = layer_kinds(model, EVERYTHING)[1]
    planned = TensorSizes(Workload(model, PRESETS["h100"], dtype=dtype), tokens, kind=kind)
    linear, half = kind.linear, DTYPES[dtype]
    weights = {
        name: torch.rand(shape, dtype=half)
        for name, shape in kind.shapes
        if name.startswith(("conv_", "decay"))
    }
    inputs = torch.randn(tokens, linear.inputs_width, dtype=half)
    do = torch.randn(tokens, linear.value_heads, linear.value_size, dtype=half)
    matrix = torch.randn(linear.value_heads, linear.key_size, linear.value_size)
    rows = torch.randn(linear.carried_tokens, linear.conv_width, dtype=half)
    state = State(matrix, rows)
    recurrence = Recurrence(weights, linear, inputs)
    operands = inputs, do, *state, *weights.values()
    forward = peak_bytes(lambda: recurrence.forward(state), operands)
    backward = peak_bytes(lambda: recurrence.backward(do, state, state), operands)
    assert recurrence_forward(planned) == pytest.approx(forward, rel=0.03)
    assert recurrence_backward(planned) == pytest.approx(backward, rel=0.03)
