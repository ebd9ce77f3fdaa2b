"""Element-wise kernels of linear attention, between its projections and that of its output.

The convolution is a sum of products of shifted inputs in fp32 (:mod:`sppo.model.recurrence`).
Backward runs all before the rule three times again: for the outputs, for the states before tiles of
tokens, and for gradients, which are two products for each of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping

from sppo.config.model import LinearAttention
from sppo.cost.elementwise.mlp_work import Work
from sppo.cost.workload import ACCUMULATION_BYTES


def linear_attention_work(
    linear: LinearAttention, *, element_bytes: int
) -> Mapping[str, list[Work]]:
    """Return the kernels of passes over the linear attention of a layer.

    Returns:
        Kernels of "forward" and "backward"; "linear_recompute" and "attention_recompute" have
        nothing but products, and there are no K and V.
    """
    wider = max(ACCUMULATION_BYTES, element_bytes) / element_bytes
    channels, keys = (round(wider * width) for width in (linear.conv_width, 2 * linear.keys_width))
    values = linear.values_width
    product: Work = ("add", channels)
    before_rule = [*[product] * linear.conv_size, ("copy", channels), ("head_norm", keys)]
    behind_rule: list[Work] = [("head_norm", values), ("add", values)]
    gradients = [*[product] * (2 * linear.conv_size + 1), ("head_norm_backward", keys)]
    gradients += [("head_norm_backward", values), *[("add", values)] * 2]
    return {
        "forward": before_rule + behind_rule,
        "backward": 3 * before_rule + behind_rule + gradients,
        "linear_recompute": [],
        "attention_recompute": [],
        "kv": [],
    }
