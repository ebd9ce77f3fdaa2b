"""Bytes of the tensors of one subsequence on one device while a layer runs.

Legend: C tokens of the subsequence on the device, E hidden, Q = N D query width, K D key width, F
MLP width, e element bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from sppo.activations.tensor_classes import mlp_widths
from sppo.config.model import LinearAttention
from sppo.cost.attention_backend import planned_backend
from sppo.cost.layer_kinds import LayerKind, layer_kinds, num_rotations
from sppo.cost.trainable import LORA_A
from sppo.cost.workload import ACCUMULATION_BYTES, Workload

LiveSet = tuple[str, int]
"""Name of a point of a pass, and bytes of the tensors that are live at this point."""

LEAST_POOLED_BYTES = 128 << 10
"""Smallest tensor of the memory pool of a CPU; the C heap handles smaller ones well."""


class TensorSizes:
    """Bytes of the tensors of one subsequence on one device.

    Args:
        workload: Model, machine, dtype and sequence parallelism. In attention, each device of a
            sequence-parallel group has some heads of all tokens.
        tokens: Tokens of the subsequence on one device.
        prefix: Tokens of the sequence before the subsequence.
        retained: Tensor classes whose saved tensors stay in memory of torch's allocator.
        defers: Whether weight halves of backwards are deferred and keep saved tensors as operands;
            otherwise retained classes are freed as soon as backward has used them.
        kind: Kind of the layer; None for that of the last layer.
        recomputes_windows: Whether a layer with a window keeps K and V in part, and puts those that
            the subsequence sees together.
        is_shard: Whether the tokens are an MSP shard.
    """

    def __init__(
        self,
        workload: Workload,
        tokens: int,
        prefix: int = 0,
        retained: frozenset[int] = frozenset(),
        *,
        defers: bool = False,
        kind: LayerKind | None = None,
        recomputes_windows: bool = False,
        is_shard: bool = False,
    ) -> None:
        model, device = workload.model, workload.hardware.device
        degree, element_bytes = workload.sequence_parallel_degree, workload.element_bytes
        self.workload, self.model, self.element_bytes = workload, model, element_bytes
        self.tokens, self.prefix, self.retained = tokens, prefix, retained
        self.freed = frozenset[int]() if defers else retained
        """Retained tensor classes that are freed as soon as backward has used them."""
        self.backend = planned_backend(workload)
        """Attention back end."""
        self.threads = device.num_multiprocessors if device.kind == "cpu" else 0
        """Threads of a CPU; 0 on a GPU, where no tiles and scratch of CPU kernels are counted."""
        self.casts = self.threads > 0 and not device.half_products
        """True if bf16 products cast tiles to fp32 (:mod:`sppo.kernels.half_products`)."""
        self.rows = tokens * degree
        """Number of queries of each head in attention: tokens of all devices of the group."""
        self.seen_keys = prefix + self.rows
        """Number of keys that the last token of the subsequence sees."""
        self.heads = max(1, model.num_heads // degree)
        """Number of query heads of one device in attention."""
        self.key_heads = max(1, model.kv_heads // degree)
        """Number of key/value heads of one device in attention."""
        self.group = self.heads // self.key_heads
        """Number of query heads per key/value head."""

        compute, accumulation = tokens * element_bytes, tokens * ACCUMULATION_BYTES
        self.hidden_bytes = self.pooled(compute * model.hidden_size)
        """Bytes of a hidden state: x_in, n1, x_mid, n2, y, or a gradient of one of them."""
        self.normed_bytes = self.hidden_bytes * _has_normed_inputs(workload)
        """Bytes of n1, or n2; 0 if projections read the residual stream itself."""
        self.output_bytes = self.hidden_bytes * model.norms_outputs
        """Bytes of the output of attention, or of the MLP, beside the stream that its norm is
        added to; 0 without a norm of outputs, as the sum takes the place of the output."""
        self.query_bytes = self.pooled(compute * model.num_heads * model.head_dim)
        """Bytes of q, o, or a gradient of one of them."""
        self.fp32_query_bytes = self.pooled(accumulation * model.num_heads * model.head_dim)
        """Bytes of the running o, or of the sum of dq, in fp32."""
        self.key_bytes = self.pooled(compute * model.kv_heads * model.head_dim)
        """Bytes of k, v, or a gradient of one of them, for the subsequence's own tokens."""
        self.key_row_bytes = self.key_heads * model.head_dim * element_bytes
        """Bytes of the gradient of k, or v, of one token in the key heads of one device."""
        self.lse_bytes = self.pooled(accumulation * model.num_heads)
        """Bytes of lse, or of another tensor with one fp32 number per row and head."""
        self.attention_gate_bytes = self.query_bytes * model.attention_gate
        """Bytes of the gate of the output of attention; 0 without one."""
        self.kind = kind or layer_kinds(model, workload.trainable)[-1]
        """Type of the layer, its adapters, and what trains in it."""
        self.is_shard = is_shard
        """Whether the tokens are an MSP shard."""
        self._recomputes_windows = recomputes_windows
        self._ranks = {
            name.removesuffix(f".{LORA_A}"): rank
            for name, (rank, _) in self.kind.recomputed_factors
        }

    @property
    def output_gradient_bytes(self) -> int:
        """Bytes of the gradient of the MLP's output, if it is not that of the residual stream."""
        is_scaled = self.model.residual_scale != 1
        return self.hidden_bytes if is_scaled else self.output_bytes

    @property
    def is_half(self) -> bool:
        """True if the compute dtype is smaller than the accumulation dtype."""
        return self.element_bytes < ACCUMULATION_BYTES

    @cached_property
    def _mlp_widths(self) -> Mapping[str, int]:
        """Widths of the inputs of activations in the MLP of the layer, by name."""
        return mlp_widths(self.model, self.kind.type)

    @property
    def mlp_bytes(self) -> int:
        """Bytes of gate, up, the activation's output, or a gradient of one of them.

        With experts, of those of all experts of each token.
        """
        return self.pooled(self.tokens * self.element_bytes * self._mlp_widths["up"])

    @property
    def shared_bytes(self) -> int:
        """Bytes of the same tensors of the MLP that all tokens share beside experts."""
        width = self._mlp_widths.get("shared_up", 0)
        return self.pooled(self.tokens * self.element_bytes * width)

    @property
    def gates_bytes(self) -> int:
        """Bytes of the inputs of all activations of the MLP: gates and ups, or up alone."""
        compute = self.tokens * self.element_bytes
        return sum(self.pooled(compute * width) for width in self._mlp_widths.values())

    @property
    def linear(self) -> LinearAttention:
        """Linear attention of a layer that has it."""
        assert self.kind.linear is not None, "the layer has linear attention"
        return self.kind.linear

    @property
    def linear_input_bytes(self) -> int:
        """Bytes of the inputs of the recurrence, or of their gradients."""
        return self.pooled(self.tokens * self.element_bytes * self.linear.inputs_width)

    @property
    def values_bytes(self) -> int:
        """Bytes of the outputs of the recurrence, of their gate, or a gradient of one of them."""
        return self.pooled(self.tokens * self.element_bytes * self.linear.values_width)

    @property
    def rotary_bytes(self) -> int:
        """Bytes of the rotary cosines and sines of the subsequence, for each rotation of layers."""
        table = 2 * self.pooled(self.tokens * ACCUMULATION_BYTES * self.model.rotary_size // 2)
        return table * num_rotations(self.model, self.workload.trainable)

    @property
    def window_kv_bytes(self) -> int:
        """Bytes of K and V that are put together for a subsequence in a layer with a window."""
        return self._window_bytes(self.element_bytes) * self._recomputes_windows

    @property
    def window_gradient_bytes(self) -> int:
        """Bytes of the sums of dK and dV of a subsequence in a layer with a window.

        0 in another layer, which adds to those of the whole sequence.
        """
        return self._window_bytes(ACCUMULATION_BYTES)

    def _window_bytes(self, element_bytes: int) -> int:
        """Return the bytes of two tensors like K of the keys that a layer with a window sees."""
        if self.kind.window is None:
            return 0
        keys = min(self.prefix, self.kind.window - 1) + self.rows
        return 2 * self.pooled(keys * self.key_heads * self.model.head_dim * element_bytes)

    def pooled(self, size: int) -> int:
        """Return the bytes of a tensor on a CPU if the memory pool allocates it, else 0.

        The C heap holds smaller tensors (:mod:`sppo.cost.memory.process_growth`).
        """
        return size if not self.threads or size >= LEAST_POOLED_BYTES else 0

    def adapter_bytes(self, *projections: str) -> int:
        """Return the bytes of ``u = x A'``, or its gradient, of the projections with an adapter."""
        is_megatron = self.workload.sequence_parallel == "megatron"
        tokens = self.rows if is_megatron else self.tokens
        ranks = (self._ranks.get(name, 0) for name in projections)
        return sum(self.pooled(tokens * rank * self.element_bytes) for rank in ranks)

    def lse_bytes_of(self, rows: int) -> int:
        """Return the bytes of the lse of some rows in attention."""
        return self.pooled(rows * self.heads * ACCUMULATION_BYTES)


def _has_normed_inputs(workload: Workload) -> bool:
    """Return whether the inputs of projections have memory beside that of the residual stream.

    They are norms of it, or with sharded weights (Megatron) its tokens gathered.
    """
    return workload.model.norms_inputs or workload.sequence_parallel == "megatron"
