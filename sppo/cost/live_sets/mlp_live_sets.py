"""Live sets of a dense MLP, beside the tensors of its layer that are live meanwhile.

Beside these, a forward has the input of the MLP's norm, and a backward has the gradient of the
output, and the inputs of the activation.

Legend: C tokens of the subsequence on one device, F MLP width.
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo.cost.live_sets.cpu_scratch import mlp_gradient_bytes, product_bytes, tiles_bytes
from sppo.cost.live_sets.tensor_sizes import LiveSet, TensorSizes
from sppo.cost.workload import ACCUMULATION_BYTES


def mlp_forward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live sets of the forward."""
    of_inputs = s.adapter_bytes("gate" if s.model.gated else "up") + product_bytes(s)
    yield "MLP inputs", s.normed_bytes + s.gates_bytes + of_inputs
    of_output = s.hidden_bytes + s.adapter_bytes("down") + product_bytes(s)
    yield "MLP output", s.gates_bytes + s.mlp_bytes + of_output


def mlp_backward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live sets of the backward."""
    inner = s.normed_bytes + s.mlp_bytes  # n2, dhidden
    tiles = tiles_bytes(s, 3, width=s.model.mlp_size) * s.element_bytes // ACCUMULATION_BYTES
    down, up, gate = map(s.adapter_bytes, ("down", "up", "gate"))
    yield "activation backward", inner + tiles + down
    # With adapters, u and its gradient of each projection in turn.
    yield "gradients of the output's factors", inner + 2 * down + mlp_gradient_bytes(s)
    factors = gate + max(up, gate) if s.model.gated else up
    yield "MLP backward", inner + s.hidden_bytes + factors + mlp_gradient_bytes(s)  # dn2
