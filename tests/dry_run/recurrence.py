"""Backward of linear attention on a fake GPU, whose tensors autograd does not support.

Its memory is allocated around the call, in the size that a plan counts: tests of
:mod:`sppo.cost.live_sets.recurrence_live_sets` hold this size to what is allocated on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sppo.cost.layer_kinds import layer_kinds
from sppo.cost.live_sets.recurrence_live_sets import recurrence_backward
from sppo.cost.live_sets.tensor_sizes import TensorSizes
from sppo.cost.workload import Workload
from sppo.model.recurrence import RECURRENCE_WEIGHTS, Recurrence, State


def fake_backward(workload: Workload) -> Callable[..., tuple[Any, ...]]:
    """Return the replacement of :meth:`sppo.model.recurrence.Recurrence.backward`."""
    kinds = layer_kinds(workload.model, workload.trainable)
    linear = next((kind for kind in kinds if kind.linear is not None), None)

    def backward(
        recurrence: Recurrence, do_CHV: Tensor, dstate: State | None, state: State | None
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        tokens = len(do_CHV) // workload.sequence_parallel_degree
        planned = recurrence_backward(TensorSizes(workload, tokens, kind=linear))
        inputs, own = recurrence.inputs_CI, recurrence.linear
        dinputs = torch.empty_like(inputs)
        matrix = own.value_heads, own.key_size, own.value_size
        dmatrix = inputs.new_empty(matrix, dtype=torch.float32)
        found = State(dmatrix, inputs.new_empty(own.carried_tokens, own.conv_width))
        made = sum(x.nbytes for x in (dinputs, *found))
        scratch = torch.empty(planned - made, dtype=torch.uint8, device=inputs.device)
        del scratch
        weights = {name: recurrence.weights[name] for name in RECURRENCE_WEIGHTS}
        return dinputs, {n: torch.empty_like(w) for n, w in weights.items()}, found

    return backward
