"""Bytes of the tensors that one subsequence has on one device while a layer runs.

Legend: C tokens of the subsequence on the device, E hidden, Q = N D query width, K D key width, F
MLP width, e element bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from sppo.config.model import ModelConfig
from sppo.cost.attention_backend import planned_backend
from sppo.cost.attention_scratch import backward_scratch_bytes
from sppo.cost.layer import ACCUMULATION_BYTES, Workload
from sppo.cost.parameters import layer_shapes
from sppo.cost.product_tile import product_rows
from sppo.units import MIB

TILE_BYTES = MIB
"""Bytes of a tile of one fp32 operand of an element-wise chain on a CPU, as in
:mod:`sppo.kernels.row_tiles`."""
ACCUMULATION_TILE_BYTES = 8 * MIB
"""Bytes of a tile that is cast for a single step, as in :mod:`sppo.kernels.row_tiles`."""
_FLASH_KEYS = 512
_FLASH_ROWS = ((768, 256), (192, 64), (1, 32))
"""Rows that torch's CPU flash kernels take at once, by the rows there are at least."""
PRODUCT_BYTES = 400 << 10
WEIGHT_PRODUCT_BYTES = 2 * MIB
"""Scratch of oneDNN's bf16 products, ours and those with transposed operands; the same."""


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
        """Whether the accumulation dtype is another than the compute dtype."""
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

    def attention_scratch(self, rows: int, keys: int) -> int:
        """What a back end's backward call allocates inside."""
        return self._scratch(rows, keys, self._heads, max(1, self.model.kv_heads // self.degree))

    def folded_scratch(self, rows: int) -> int:
        """The same of a call that has all query heads as key heads."""
        return self._scratch(rows, rows, self._heads, self._heads)

    @property
    def _heads(self) -> int:
        return max(1, self.model.num_heads // self.degree)

    def _scratch(self, rows: int, keys: int, heads: int, kv_heads: int) -> int:
        return backward_scratch_bytes(
            self.backend,
            rows=rows,
            keys=keys,
            heads=heads,
            kv_heads=kv_heads,
            head_size=self.model.head_dim,
            element_bytes=self.element,
        )

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
        """What the MLP's activation takes: gate and up, or up alone."""
        return (2 if self.model.gated else 1) * self.mlp

    @property
    def rotary(self) -> int:
        """Cosines and sines."""
        rotary = self.model.position == "rotary"
        return self.tokens * self.model.head_dim * ACCUMULATION_BYTES if rotary else 0

    def tiles(self, count: int, *, width: int) -> int:
        """``count`` fp32 tiles of a tensor ``[C, width]``."""
        return (
            count * min(TILE_BYTES, self.tokens * width * ACCUMULATION_BYTES) if self.threads else 0
        )

    def cast(self, compute_bytes: int) -> int:
        """A tile of a tensor in fp32, made where it joins one in the accumulation dtype."""
        fp32_bytes = compute_bytes // self.element * ACCUMULATION_BYTES
        return min(ACCUMULATION_TILE_BYTES, fp32_bytes) if self.threads and self.is_half else 0

    def group_sum(self, compute_bytes: int) -> int:
        """Key gradients of every query head while they become those of key heads."""
        group = self.model.num_heads // self.model.kv_heads
        cast = self.cast(compute_bytes)
        return cast + cast // group if group > 1 else cast

    def product(self, name: str) -> int:
        """Scratch bytes of the product ``name`` (:meth:`weight_gradient`)."""
        return self.weight_gradient(*layer_shapes(self.model)[f"{name}.weight"])

    def weight_gradient(self, outputs: int, inputs: int) -> int:
        """A tile of one before it joins its fp32 sum; fp32 ones and a GPU's are added in place."""
        if not (self.threads and self.is_half):
            return 0
        rows = min(outputs, product_rows(inputs, element_bytes=self.element))
        return rows * inputs * self.element + WEIGHT_PRODUCT_BYTES

    def scratch(self, size: int) -> int:
        """Scratch bytes of a bf16 product on a CPU."""
        return size if self.threads and self.is_half else 0

    @property
    def key_parts(self) -> int:
        """Parts of a prefix that give every thread the same work, as in its kernel."""
        heads = self.model.kv_heads
        return self.threads // gcd(heads, self.threads) if self.threads else 1

    def flash_scratch(self, rows: int, *, buffers: int) -> int:
        """Scratch bytes of torch's CPU flash kernels: per thread, ``buffers`` tiles of scores."""
        if not self.threads:
            return 0
        at_once = next(size for least, size in _FLASH_ROWS if rows >= least)
        widths = ACCUMULATION_BYTES + (self.element if self.is_half else 0)
        return self.threads * buffers * min(at_once, rows) * _FLASH_KEYS * widths


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
