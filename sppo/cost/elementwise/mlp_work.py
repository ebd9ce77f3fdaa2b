"""Element-wise kernels of the MLP of one layer, be it dense or a mixture of experts.

Experts take the rows of tokens in the order of the experts (:mod:`sppo.model.experts`). All that is
saved is in the order of tokens, so rows are copied between both orders beside the products.

Legend: E hidden, F MLP width, X experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sppo.config.model import Experts, LayerType, ModelConfig

Work = tuple[str, int]
"""Name of an element-wise kernel, and elements of every token that a call works on."""

_SCORE_PASSES = 4
"""Copies of fp32 logits that take as long as choosing experts, and as its backward."""


def mlp_work(
    model: ModelConfig, layer_type: LayerType, *, trained: Collection[str]
) -> Mapping[str, list[Work]]:
    """Return the kernels of passes over the MLP of a layer.

    Args:
        model: Model configuration.
        layer_type: Type of the layer.
        trained: Names of the parameters that have gradients, of which biases matter here.

    Returns:
        Kernels of "forward", of "backward", and of "linear_recompute", the recomputation of the
        inputs of activations.
    """
    experts = model.experts_of(layer_type)
    if experts is not None:
        return _expert_work(model, experts, trained=trained)
    backward = [(f"{model.mlp}_backward", model.mlp_size)]
    widths = {"gate": model.mlp_size, "up": model.mlp_size, "down": model.hidden_size}
    backward += bias_gradients(widths, trained=trained)
    return {
        "forward": [(model.mlp, model.mlp_size)],
        "backward": backward,
        "linear_recompute": [],
    }


def _expert_work(
    model: ModelConfig, experts: Experts, *, trained: Collection[str]
) -> Mapping[str, list[Work]]:
    """Return the kernels of passes over the experts of a layer, by pass."""
    e, shared = model.hidden_size, experts.shared_mlp_size
    rows_e, rows_f = experts.per_token * e, experts.per_token * experts.mlp_size
    scores: Work = ("copy", _SCORE_PASSES * experts.count)
    # Rows of tokens to experts; both projections back to tokens.
    to_experts, to_tokens = [("copy", rows_e)], [("copy", rows_f)] * 2
    biases = [("add", rows_f)] * 2 * experts.bias
    inputs = [*to_experts, *to_tokens, *biases]
    # Rows back to tokens, which then have k rows each, and their sum, which is one row.
    back: list[Work] = [("copy", rows_e), ("copy", (rows_e + e) // 2)]
    beside: list[Work] = [(model.mlp, shared), ("add", e)] if shared else []
    beside_backward: list[Work] = [(f"{model.mlp}_backward", shared), ("add", e)] if shared else []
    weighed: Work = ("copy", rows_f)
    of_weights = [(model.mlp, rows_f), ("add", rows_f), ("bias_gradient", rows_f)]
    return {
        "forward": [
            *(scores, *inputs, (model.mlp, rows_f), weighed, ("copy", rows_f), *back, *beside),
        ],
        "backward": [
            *(scores, scores, *to_experts, ("copy", rows_f), *of_weights, weighed),
            *((f"{model.mlp}_backward", rows_f), weighed, ("copy", rows_f)),
            *(*to_experts, *to_tokens, ("add", rows_e), *back, *beside_backward),
            *bias_gradients({"expert_gate": rows_f, "expert_up": rows_f}, trained=trained),
        ],
        "linear_recompute": inputs,
    }


def bias_gradients(widths: Mapping[str, int], *, trained: Collection[str]) -> list[Work]:
    """Return the kernels of the gradients of biases, given the widths of their projections."""
    return [("bias_gradient", width) for name, width in widths.items() if f"{name}.bias" in trained]
