"""Element-wise kernels of linear attention, between its projections and that of its output.

The convolution is a sum of products of shifted inputs (:mod:`sppo.model.recurrence`). Backward runs
all of it again, and its gradient: of each product of the convolution one for the input and one for
the weight.
"""

from __future__ import annotations

from collections.abc import Mapping

from sppo.config.model import LinearAttention
from sppo.cost.mlp_work import Work


def linear_attention_work(linear: LinearAttention) -> Mapping[str, list[Work]]:
    """Return the kernels of passes over the linear attention of a layer.

    Returns:
        Kernels of "forward", of "backward", and of "linear_recompute", the recomputation of the
        output; nothing is recomputed for the class attention, and there are no K and V.
    """
    channels, values = linear.conv_width, linear.values_width
    product: Work = ("add", channels)
    norms = [("head_norm", 2 * linear.keys_width), ("head_norm", values)]
    forward = [*[product] * linear.conv_size, ("copy", channels), *norms, ("add", values)]
    of_norms = [(f"{name}_backward", width) for name, width in norms]
    gradients = [*[product] * 2 * linear.conv_size, product, *of_norms, *[("add", values)] * 2]
    return {
        "forward": forward,
        "backward": forward + gradients,
        "linear_recompute": forward,
        "attention_recompute": [],
        "kv": [],
    }
