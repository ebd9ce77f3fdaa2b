"""Bytes of the tensors of one subsequence on one device while a layer runs.

Legend: C tokens of the subsequence on the device, E hidden, Q = N D query width, K D key width, F
MLP width, e element bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sppo.config.model import ModelConfig
from sppo.cost.attention_backend import planned_backend
from sppo.cost.layer import ACCUMULATION_BYTES, Workload

LiveSet = tuple[str, int]
"""Name of a point of a pass, and bytes of the tensors that are live at this point."""

LEAST_POOLED_BYTES = 128 << 10
"""Smallest tensor of the memory pool of a CPU, as in :mod:`sppo.kernels.native.cpu_allocator`."""


@dataclass(frozen=True)
class TensorSizes:
    """Bytes of the tensors of one subsequence on one device.

    Attributes:
        workload: Model, machine, dtype and sequence parallelism. In attention, each device of a
            sequence-parallel group has some heads of all tokens.
        tokens: Tokens of the subsequence on one device.
        prefix: Tokens of the sequence before the subsequence.
        retained: Tensor classes whose saved tensors stay in memory of torch's allocator.
        defers: Whether weight halves of backwards are deferred and keep saved tensors as operands;
            otherwise retained classes are freed as soon as backward has used them.
    """

    workload: Workload
    tokens: int
    prefix: int = 0
    retained: frozenset[int] = frozenset()
    defers: bool = False

    @cached_property
    def model(self) -> ModelConfig:
        """Shape of the model."""
        return self.workload.model

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of an element of the compute dtype."""
        return self.workload.element_bytes

    @cached_property
    def threads(self) -> int:
        """Threads of a CPU; 0 on a GPU, where no tiles and scratch of CPU kernels are counted."""
        device = self.workload.hardware.device
        return device.num_multiprocessors if device.kind == "cpu" else 0

    @cached_property
    def backend(self) -> str:
        """Attention back end."""
        return planned_backend(self.workload)

    @property
    def freed(self) -> frozenset[int]:
        """Retained tensor classes that are freed as soon as backward has used them."""
        return frozenset() if self.defers else self.retained

    @property
    def casts(self) -> bool:
        """True if bf16 products cast tiles to fp32 (:mod:`sppo.kernels.half_products`)."""
        return self.threads > 0 and not self.workload.hardware.device.half_products

    @property
    def is_half(self) -> bool:
        """True if the compute dtype is smaller than the accumulation dtype."""
        return self.element_bytes < ACCUMULATION_BYTES

    def pooled(self, size: int) -> int:
        """Return the bytes of a tensor on a CPU if the memory pool allocates it, else 0.

        The C heap holds smaller tensors (:mod:`sppo.cost.memory.process_growth`).
        """
        return size if not self.threads or size >= LEAST_POOLED_BYTES else 0

    def _token_bytes(self, width: int, element_bytes: int | None = None) -> int:
        """Return the bytes of a tensor ``[C, width]`` in the compute dtype, or in another one."""
        return self.pooled(self.tokens * width * (element_bytes or self.element_bytes))

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a hidden state: x_in, n1, x_mid, n2, y, or a gradient of one of them."""
        return self._token_bytes(self.model.hidden_size)

    @property
    def query_bytes(self) -> int:
        """Bytes of q, o, or a gradient of one of them."""
        return self._token_bytes(self.model.num_heads * self.model.head_dim)

    @property
    def fp32_query_bytes(self) -> int:
        """Bytes of the running o, or of the sum of dq, in fp32."""
        return self._token_bytes(self.model.num_heads * self.model.head_dim, ACCUMULATION_BYTES)

    @property
    def key_bytes(self) -> int:
        """Bytes of k, v, or a gradient of one of them, for the subsequence's own tokens."""
        return self._token_bytes(self.model.kv_heads * self.model.head_dim)

    @property
    def rows(self) -> int:
        """Number of queries of each head in attention: tokens of all devices of the group."""
        return self.tokens * self.workload.sequence_parallel_degree

    @property
    def heads(self) -> int:
        """Number of query heads of one device in attention."""
        return max(1, self.model.num_heads // self.workload.sequence_parallel_degree)

    @property
    def key_heads(self) -> int:
        """Number of key/value heads of one device in attention."""
        return max(1, self.model.kv_heads // self.workload.sequence_parallel_degree)

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
        return self._token_bytes(self.model.num_heads, ACCUMULATION_BYTES)

    def lse_bytes_of(self, rows: int) -> int:
        """Return the bytes of the lse of some rows in attention."""
        return self.pooled(rows * self.heads * ACCUMULATION_BYTES)

    @property
    def mlp_bytes(self) -> int:
        """Bytes of gate, up, the activation's output, or a gradient of one of them."""
        return self._token_bytes(self.model.mlp_size)

    @property
    def gates_bytes(self) -> int:
        """Bytes of the inputs of the MLP's activation: gate and up, or up alone."""
        return (2 if self.model.gated else 1) * self.mlp_bytes

    @property
    def rotary_bytes(self) -> int:
        """Bytes of the rotary cosines and sines of the subsequence; 0 without rotary positions."""
        rotary = self.model.position == "rotary"
        return 2 * self._token_bytes(self.model.head_dim, ACCUMULATION_BYTES // 2) * rotary
