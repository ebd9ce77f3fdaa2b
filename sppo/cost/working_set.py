"""What the running subsequence needs beside everything that is saved: its working set, exactly.

Every tensor of :mod:`sppo.model.layer`, :mod:`sppo.kernels` and the head has a name and a size; a
live set of a pass holds those that are live at a time, and the working set is the largest live set.
Chains of element-wise operations count as tiles (:mod:`sppo.kernels.row_tiles`), and torch's CPU
kernels with the scratch they were seen to take; on a GPU both are fused away (until its kernels
are there, chains take more). Saved tensors are not counted: they have a bucket of their own, from
which backward reads them in place.

Legend: C tokens of the subsequence on one device, E hidden, Q = N D query width, K D key width, F
MLP width, V vocabulary, e element bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.config.model import ModelConfig
from sppo.cost.layer import ACCUMULATION_BYTES, Workload
from sppo.cost.logits_tile import tile_tokens
from sppo.cost.parameters import layer_shapes
from sppo.cost.product_tile import product_rows
from sppo.units import MIB

TILE_BYTES = MIB
"""Bytes of a tile of one fp32 operand of an element-wise chain on a CPU, as in
:mod:`sppo.kernels.row_tiles`."""
ACCUMULATION_TILE_BYTES = 8 * MIB
"""Bytes of a tile that is cast for a single step, as in :mod:`sppo.kernels.row_tiles`."""
CAUSAL_TOKENS = 2048
"""Rows of the largest causal square, as in :mod:`sppo.kernels.attention.blocks`."""
PREFIX_KEYS = 8192
"""Keys of the longest part of a prefix, as there."""
HALF_TOKENS = 256
"""Rows and keys in multiples of which attention is computed in bf16 on a CPU, as in
:mod:`sppo.kernels.attention.cpu_flash`; the rest is in fp32."""
LEAST_PART_KEYS = 512
"""Fewest keys of the parts that a prefix is cut into where it has fewer heads than there are
threads, as in :mod:`sppo.kernels.attention.cpu_flash`."""

_FLASH_KEYS = 512
_FLASH_ROWS = ((768, 256), (192, 64), (1, 32))
"""Rows that torch's CPU flash kernels take at once, by the rows there are at least."""
_FLASH_COMPUTE_BYTES = 450 << 10
"""What its backward takes beyond that per thread, in bf16; measured with torch 2.13."""
_PRODUCT_BYTES = 400 << 10
_WEIGHT_PRODUCT_BYTES = 2 * MIB
"""Scratch of oneDNN's bf16 products, ours and those with transposed operands; the same."""


@dataclass(frozen=True, slots=True)
class LiveSet:
    """A point of a pass and the bytes of the tensors that live at it."""

    name: str
    live_bytes: int


@lru_cache(maxsize=1 << 15)
def working_sets(
    workload: Workload,
    *,
    tokens: int,
    prefix: int,
    recomputed: frozenset[int],
    input_every: int = 1,
    layers: int,
) -> tuple[LiveSet, LiveSet]:
    """The largest live set of a layer's forward, and of its backward.

    Args:
        workload: what runs where.
        tokens: of the subsequence, on one device.
        prefix: tokens before it.
        recomputed: tensor classes that backward recomputes.
        input_every: interval in layers between saved inputs.
        layers: of the stage.
    """
    sizes = _sizes(workload, tokens, prefix=prefix)
    forward = _forward(sizes, recomputed=recomputed)
    backward = _backward(sizes, recomputed=recomputed, input_every=input_every, layers=layers)
    return _largest(forward), _largest(backward)


def most_working_set(
    workload: Workload, *, tokens: int, prefix: int, input_every: int = 1, layers: int
) -> LiveSet:
    """Return a bound of :func:`working_sets`, whatever is recomputed.

    A forward needs most where all is saved, for what is saved leaves only when the layer is done; a
    backward where all is recomputed, or where the inputs of layers are.
    """
    sizes = _sizes(workload, tokens, prefix=prefix)
    live_sets = [*_forward(sizes, recomputed=frozenset())]
    for recomputed in (frozenset((ATTENTION, LINEAR)), frozenset((LINEAR,)))[: min(2, input_every)]:
        live_sets += _backward(sizes, recomputed=recomputed, input_every=input_every, layers=layers)
    return _largest(live_sets)


def forward_working_set(workload: Workload, *, tokens: int) -> LiveSet:
    """The largest live set of a layer's forward of which nothing is saved."""
    sizes = _sizes(workload, tokens)
    return _largest(_forward(sizes, recomputed=frozenset((ATTENTION, LINEAR))))


def loss_working_set(workload: Workload, *, tokens: int) -> LiveSet:
    """The largest live set of the final norm, the head and the loss, both ways in one."""
    return _largest(_loss(_sizes(workload, tokens)))


def _largest(live_sets: Iterable[LiveSet]) -> LiveSet:
    return max(live_sets, key=lambda live_set: live_set.live_bytes)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of the tensors of one subsequence."""

    model: ModelConfig
    tokens: int
    prefix: int
    element: int
    device: str
    """Its kind."""
    threads: int
    """0 on a GPU, where neither tiles nor scratch are counted."""

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
        return rows * inputs * self.element + _WEIGHT_PRODUCT_BYTES

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


def _sizes(workload: Workload, tokens: int, *, prefix: int = 0) -> _Sizes:
    device = workload.hardware.device
    threads = device.num_multiprocessors if device.kind == "cpu" else 0
    return _Sizes(workload.model, tokens, prefix, workload.element_bytes, device.kind, threads)


def _forward(s: _Sizes, *, recomputed: frozenset[int]) -> Iterator[LiveSet]:
    retained_queries = 0 if LINEAR in recomputed else s.query + (s.key if s.model.qk_norm else 0)
    retained_outputs = 0 if ATTENTION in recomputed else s.query + s.lse
    base = s.rotary + s.hidden
    inputs = s.query + 2 * s.key
    yield LiveSet("projections", base + s.hidden + inputs + s.scratch(_PRODUCT_BYTES))
    normed = 1 if s.model.qk_norm else 0
    turned = base + inputs + (1 + normed) * s.query + s.tiles(2, width=s.model.hidden_size)
    yield LiveSet("rotation", turned)
    base_attention = base + inputs + (retained_queries if s.model.qk_norm else 0)
    for name, live in _attention_forward(s):
        yield LiveSet(f"attention forward, {name}", base_attention + live)
    base += retained_queries + retained_outputs + s.hidden
    yield LiveSet("MLP inputs", base + s.hidden + s.gates + s.scratch(_PRODUCT_BYTES))
    yield LiveSet("MLP output", base + s.gates + s.mlp + s.hidden + s.scratch(_PRODUCT_BYTES))


def _attention_forward(s: _Sizes) -> Iterator[tuple[str, int]]:
    """Live bytes beside q, k and v: queries by head, the running output, a block's output."""
    merged, block = s.fp32_query + s.lse, s.query + s.lse
    yield "a block", s.query + merged + block + s.flash_scratch(s.tokens, buffers=1)
    yield "merging", s.query + merged + block + 3 * s.lse + s.cast(s.query)
    yield "output", merged + s.query


def _backward(
    s: _Sizes, *, recomputed: frozenset[int], input_every: int, layers: int
) -> Iterator[LiveSet]:
    own_linear, own_attention = LINEAR in recomputed, ATTENTION in recomputed
    interval = 1 if own_attention else min(input_every, layers)
    base = s.rotary + _waiting(s, recomputed=recomputed, others=interval - 1) + s.hidden  # n1
    if layers > interval:  # the gradient that comes from above; the last layer's was saved
        base += s.hidden
    queries = s.query if own_linear or s.model.qk_norm else 0
    if own_linear:
        yield LiveSet("rotation recomputed", base + 2 * s.query + s.tiles(2, width=_query_width(s)))
    queries += s.query if own_linear and s.model.qk_norm else 0
    if own_attention:
        for name, live in _attention_forward(s):
            yield LiveSet(f"attention recomputed, {name}", base + queries + live)
    outputs = s.query + s.lse if own_attention else 0
    base += queries + outputs
    inner = s.hidden + (s.hidden + s.gates if own_linear else 0)  # n2; x_mid, gate and up
    inner += s.mlp  # dhidden
    tiles = s.tiles(3, width=s.model.mlp_size) * s.element // ACCUMULATION_BYTES
    yield LiveSet("activation backward", base + inner + tiles)
    yield LiveSet("MLP backward", base + inner + s.hidden + s.product("down"))  # and dn2
    base += 2 * s.hidden  # dx_mid, do
    base += s.query - s.hidden
    for name, live in _attention_backward(s):
        yield LiveSet(f"attention backward, {name}", base + live)


def _waiting(s: _Sizes, *, recomputed: frozenset[int], others: int) -> int:
    """Recomputed tensors of the layers whose inputs are not saved, until their own turn comes."""
    return others * (s.hidden + (s.hidden + s.gates if LINEAR in recomputed else 0))


def _attention_backward(s: _Sizes) -> Iterator[tuple[str, int]]:
    """Live bytes beside q, o and do: all three by head, the sum of dq, a block's gradients."""
    base = 3 * s.query + s.fp32_query + s.threads * (_FLASH_COMPUTE_BYTES if s.is_half else 0)
    square = min(s.tokens, CAUSAL_TOKENS)
    of_square = s.query * square // s.tokens
    # dq, dk and dv of every query head, and the product of o and do.
    yield "a causal square", base + 4 * of_square + s.flash_scratch(square, buffers=2)
    rows = s.tokens % HALF_TOKENS if s.is_half and s.threads else 0
    if rows:
        # Beside the same four: q, o, do, k and v cast.
        operands = (7 * s.fp32_query + 2 * s.cast_key) * rows // s.tokens
        yield "a small causal square", base + operands + s.flash_scratch(rows, buffers=2)
    yield "adding a causal square", base + 3 * of_square + s.group_sum(of_square)
    if s.prefix:
        keys = min(s.prefix, PREFIX_KEYS)
        parts = max(1, min(s.key_parts, keys // LEAST_PART_KEYS))
        key_gradients = 2 * keys * (s.key // s.tokens)
        of_parts = parts * s.query + key_gradients
        # And the product of o and do.
        in_kernel = of_parts + parts * s.query + s.flash_scratch(s.tokens, buffers=2)
        yield "the prefix", base + in_kernel
        yield "adding to the prefix", base + of_parts + s.cast(max(s.query, key_gradients // 2))
        if parts > 1:
            yield "parts of the prefix put together", base + of_parts + s.fp32_query + key_gradients


def _query_width(s: _Sizes) -> int:
    return s.model.num_heads * s.model.head_dim


def _loss(s: _Sizes) -> Iterator[LiveSet]:
    vocabulary, hidden = s.model.vocab_size, s.model.hidden_size
    of_tile = tile_tokens(vocabulary, element_bytes=s.element, device=s.device)
    logits = min(s.tokens, of_tile) * vocabulary * s.element
    base = 3 * s.hidden  # the last layer's output, its norm, and that one's gradient
    if s.is_half:
        yield LiveSet("logits", base + logits + s.tiles(1, width=vocabulary))
    yield LiveSet("logit gradients", base + logits + s.weight_gradient(vocabulary, hidden))
    yield LiveSet("final norm", base + s.hidden + s.tiles(5, width=s.model.hidden_size))
