"""Memory of one rank by bucket, before the run.

Legend: S tokens of a sequence, C of its longest subsequence, E hidden, F MLP width, K key/value
heads, D head size, L layers, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod

from sppo.config.model import ModelConfig
from sppo.planning.activation_policy import saved_bytes_per_token, tensor_bytes_per_token
from sppo.planning.parameters import num_parameters, parameter_shapes

LEAST_TILE_TOKENS = 64
"""Tokens of a tile of logits, however large the vocabulary."""
WIDE_BYTES = 4
"""Masters, gradients, optimizer moments and dK/dV are fp32."""


@dataclass(frozen=True, slots=True)
class MemoryBuckets:
    """Bytes held at the peak of a step, by what holds them."""

    weights_bytes: int
    """Parameters in the compute dtype."""
    gradients_bytes: int
    """fp32 sums."""
    optimizer_bytes: int
    """AdamW's two moments, and fp32 masters where the weights are narrower."""
    kv_bytes: int
    """K, V and their fp32 gradients, all layers, one sequence."""
    activations_bytes: int
    """What the policy saves of one sequence, all layers."""
    loss_gradient_bytes: int
    """Gradient of the last layer's output, formed in forward."""
    working_bytes: int
    """Of the running subsequence: a layer's tensors and their gradients, a tile of logits."""

    @property
    def total_bytes(self) -> int:
        """All buckets together."""
        return sum(getattr(self, field.name) for field in fields(self))


def memory_of_rank(
    model: ModelConfig,
    *,
    length: int,
    longest: int,
    policy: str,
    element_bytes: int,
    tile_bytes: int,
) -> MemoryBuckets:
    """Buckets of one rank that holds the whole model and runs its sequences one after another.

    Args:
        model: the shape.
        length: S.
        longest: C, tokens of the longest subsequence.
        policy: activation policy.
        element_bytes: of the compute dtype, 2 for bf16.
        tile_bytes: of one tile of fp32 logits.
    """
    parameters = num_parameters(model)
    kv_elements = 2 * length * model.kv_heads * model.head_dim * model.num_layers
    saved = saved_bytes_per_token(policy, model, element_bytes=element_bytes)
    masters = WIDE_BYTES if element_bytes < WIDE_BYTES else 0
    return MemoryBuckets(
        weights_bytes=parameters * element_bytes,
        gradients_bytes=parameters * WIDE_BYTES,
        optimizer_bytes=parameters * (2 * WIDE_BYTES + masters),
        kv_bytes=kv_elements * (element_bytes + WIDE_BYTES),
        activations_bytes=saved * length * model.num_layers,
        loss_gradient_bytes=length * model.hidden_size * element_bytes,
        working_bytes=_working_bytes(model, longest, element_bytes)
        + 2 * max(tile_bytes, LEAST_TILE_TOKENS * model.vocab_size * WIDE_BYTES)
        + _gradient_bytes(model, element_bytes),
    )


def _gradient_bytes(model: ModelConfig, element_bytes: int) -> int:
    """The largest weight gradient before it is added to its fp32 sum; fp32 weights add in place."""
    if element_bytes >= WIDE_BYTES:
        return 0
    return max(prod(shape) for shape in parameter_shapes(model).values()) * element_bytes


def _working_bytes(model: ModelConfig, longest: int, element_bytes: int) -> int:
    """A layer's named tensors, their gradients, and the MLP's output once more."""
    per_token = sum(tensor_bytes_per_token(model, element_bytes=element_bytes).values())
    return longest * (2 * per_token + 2 * model.mlp_size * element_bytes)
