"""Bytes of the tensors of one subsequence on one device while a layer runs.

Legend: C tokens of the subsequence on the device, E hidden, Q = N D query width, K D key width, F
MLP width, e element bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo.config.model import ModelConfig
from sppo.cost.attention_backend import planned_backend
from sppo.cost.layer import ACCUMULATION_BYTES, Workload

LiveSet = tuple[str, int]
"""Name of a point of a pass, and bytes of the tensors that are live at this point."""

LEAST_POOLED_BYTES = 128 << 10
"""Smallest tensor of the memory pool of a CPU, as in :mod:`sppo.kernels.native.cpu_allocator`."""


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """Bytes of the tensors of one subsequence on one device."""

    model: ModelConfig
    tokens: int
    prefix: int
    element_bytes: int
    device: str
    """Kind of the device, "cpu" or "cuda"."""
    threads: int
    """Threads of a CPU; 0 on a GPU, where neither tiles nor scratch of CPU kernels are counted."""
    degree: int = 1
    """Devices of a sequence-parallel group; in attention, each has some heads of all tokens."""
    backend: str = "cpu_flash"
    """Attention back end."""
    retained: frozenset[int] = frozenset()
    """Tensor classes whose saved tensors stay in memory of torch's allocator."""
    freed: frozenset[int] = frozenset()
    """Retained tensor classes that are freed as soon as backward has used them."""
    casts: bool = False
    """Whether bf16 products cast tiles to fp32 (:mod:`sppo.kernels.half_products`)."""

    @property
    def is_half(self) -> bool:
        """True if the compute dtype is smaller than the accumulation dtype."""
        return self.element_bytes < ACCUMULATION_BYTES

    def pooled(self, size: int) -> int:
        """Return the bytes of a tensor on a CPU if the memory pool allocates it, else 0.

        The C heap holds smaller tensors (:mod:`sppo.cost.memory.process_growth`).
        """
        return size if not self.threads or size >= LEAST_POOLED_BYTES else 0

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a hidden state: x_in, n1, x_mid, n2, y, or a gradient of one of them."""
        return self.pooled(self.tokens * self.model.hidden_size * self.element_bytes)

    @property
    def query_bytes(self) -> int:
        """Bytes of q, o, or a gradient of one of them."""
        return self.pooled(self.tokens * self._query_width * self.element_bytes)

    @property
    def fp32_query_bytes(self) -> int:
        """Bytes of the running o, or of the sum of dq, in fp32."""
        return self.pooled(self.tokens * self._query_width * ACCUMULATION_BYTES)

    @property
    def key_bytes(self) -> int:
        """Bytes of k, v, or a gradient of one of them, for the subsequence's own tokens."""
        return self.pooled(self.tokens * self._key_width * self.element_bytes)

    @property
    def _query_width(self) -> int:
        return self.model.num_heads * self.model.head_dim

    @property
    def _key_width(self) -> int:
        return self.model.kv_heads * self.model.head_dim

    @property
    def rows(self) -> int:
        """Number of queries of each head in attention: tokens of all devices of the group."""
        return self.tokens * self.degree

    @property
    def heads(self) -> int:
        """Number of query heads of one device in attention."""
        return max(1, self.model.num_heads // self.degree)

    @property
    def key_heads(self) -> int:
        """Number of key/value heads of one device in attention."""
        return max(1, self.model.kv_heads // self.degree)

    @property
    def group(self) -> int:
        """Number of query heads per key/value head."""
        return self.heads // self.key_heads

    @property
    def seen_keys(self) -> int:
        """Number of keys that the last token of the subsequence sees."""
        return self.prefix + self.rows

    @property
    def key_row_bytes(self) -> int:
        """Bytes of the gradient of k, or v, of one token in the key heads of one device."""
        return self.key_heads * self.model.head_dim * self.element_bytes

    @property
    def lse_bytes(self) -> int:
        """Bytes of lse, or of another tensor with one fp32 number per row and head."""
        return self.pooled(self.tokens * self.model.num_heads * ACCUMULATION_BYTES)

    @property
    def mlp_bytes(self) -> int:
        """Bytes of gate, up, the activation's output, or a gradient of one of them."""
        return self.pooled(self.tokens * self.model.mlp_size * self.element_bytes)

    @property
    def gates_bytes(self) -> int:
        """Bytes of the inputs of the MLP's activation: gate and up, or up alone."""
        return (2 if self.model.gated else 1) * self.mlp_bytes

    @property
    def rotary_bytes(self) -> int:
        """Bytes of the rotary cosines and sines of the subsequence; 0 without rotary positions."""
        rotary = self.model.position == "rotary"
        each = self.pooled(self.tokens * self.model.head_dim * ACCUMULATION_BYTES // 2)
        return 2 * each if rotary else 0


def tensor_sizes(
    workload: Workload,
    tokens: int,
    *,
    prefix: int = 0,
    retained: frozenset[int] = frozenset(),
    defers: bool = False,
) -> TensorSizes:
    """Return the tensor sizes of a subsequence of ``tokens`` on one device.

    Args:
        workload: Model, machine, dtype and sequence parallelism.
        tokens: Tokens of the subsequence on one device.
        prefix: Tokens of the sequence before the subsequence.
        retained: Tensor classes whose saved tensors stay in memory of torch's allocator.
        defers: Whether weight halves of backwards are deferred and keep saved tensors as operands.
    """
    device = workload.hardware.device
    return TensorSizes(
        workload.model,
        tokens,
        prefix,
        workload.element_bytes,
        device.kind,
        device.num_multiprocessors if device.kind == "cpu" else 0,
        workload.sequence_parallel_degree,
        planned_backend(workload),
        retained,
        frozenset() if defers else retained,
        device.kind == "cpu" and not device.half_products,
    )
