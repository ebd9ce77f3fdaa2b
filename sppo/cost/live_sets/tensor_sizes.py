"""Bytes of the tensors that one subsequence has on one device while a layer runs.

Legend: C tokens of the subsequence on the device, E hidden, Q = N D query width, K D key width, F
MLP width, e element bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo.config.model import ModelConfig
from sppo.cost.attention_backend import planned_backend
from sppo.cost.layer import ACCUMULATION_BYTES, Workload


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """Bytes of the tensors of one subsequence."""

    model: ModelConfig
    tokens: int
    prefix: int
    element: int
    device: str
    """Its kind."""
    threads: int
    """0 on a GPU, where neither tiles nor scratch are counted."""
    degree: int = 1
    """Sequence-parallel devices, each of which has a part of the heads and all tokens in
    attention."""
    backend: str = "cpu_flash"
    """Back end of attention."""
    retained: frozenset[int] = frozenset()
    """Tensor classes whose saved tensors stay where they were made, on a GPU."""
    freed: frozenset[int] = frozenset()
    """Those of them that go as soon as backward has used them."""

    @property
    def is_half(self) -> bool:
        """Return whether the accumulation dtype is another than the compute dtype."""
        return self.element < ACCUMULATION_BYTES

    @property
    def hidden(self) -> int:
        """x_in, n1, x_mid, n2, y and their gradients."""
        return self.tokens * self.model.hidden_size * self.element

    @property
    def query(self) -> int:
        """Q, o and their gradients."""
        return self.tokens * self.model.num_heads * self.model.head_dim * self.element

    @property
    def fp32_query(self) -> int:
        """Running o, or the sum of dq, in fp32."""
        return self.query // self.element * ACCUMULATION_BYTES

    @property
    def key(self) -> int:
        """K, v and their gradients, of the subsequence's own tokens."""
        return self.tokens * self.model.kv_heads * self.model.head_dim * self.element

    @property
    def seen_keys(self) -> int:
        """Keys that the subsequence's last token sees."""
        return self.prefix + self.tokens * self.degree

    @property
    def key_row(self) -> int:
        """Gradients of one token's k, or v, in attention: of the key heads of one device."""
        heads = max(1, self.model.kv_heads // self.degree)
        return heads * self.model.head_dim * self.element

    @property
    def cast_key(self) -> int:
        """K or v in fp32."""
        return self.key // self.element * ACCUMULATION_BYTES

    @property
    def lse(self) -> int:
        """Anything with one fp32 number per row and head."""
        return self.tokens * self.model.num_heads * ACCUMULATION_BYTES

    @property
    def mlp(self) -> int:
        """Gate, up, the activation's output, and their gradients."""
        return self.tokens * self.model.mlp_size * self.element

    @property
    def gates(self) -> int:
        """Return the widths of the MLP's activation: gate and up, or up alone."""
        return (2 if self.model.gated else 1) * self.mlp

    @property
    def rotary(self) -> int:
        """Cosines and sines."""
        rotary = self.model.position == "rotary"
        return self.tokens * self.model.head_dim * ACCUMULATION_BYTES if rotary else 0


def tensor_sizes(
    workload: Workload,
    tokens: int,
    *,
    prefix: int = 0,
    retained: frozenset[int] = frozenset(),
    defers: bool = False,
) -> TensorSizes:
    """Return the sizes of a subsequence of ``tokens`` on one device.

    Args:
        workload: what runs where.
        tokens: of the subsequence, on one device.
        prefix: tokens of the sequence before it.
        retained: tensor classes whose saved tensors stay on the device; only asked of a GPU.
        defers: weight halves of backwards are deferred, and keep saved tensors as operands.
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
        planned_backend(workload) if device.kind == "cuda" else "cpu_flash",
        retained,
        frozenset() if defers else retained,
    )
