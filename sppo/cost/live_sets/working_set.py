"""Working set: exact memory of the running subsequence, without saved tensors.

Every tensor of :mod:`sppo.model.layer`, :mod:`sppo.kernels` and the head has a name and a size. A
live set of a pass is the tensors that are live at a time, and the working set is the largest live
set: see :mod:`sppo.cost.live_sets.cpu_live_sets` and :mod:`sppo.cost.live_sets.gpu_live_sets`. An
MSP shard has more live tensors (:mod:`sppo.cost.live_sets.shard_live_sets`). Saved tensors are not
counted: they have a bucket of their own, from which backward reads them in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import starmap

from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cost.layer import Workload
from sppo.cost.live_sets import cpu_live_sets, gpu_live_sets
from sppo.cost.live_sets.shard_live_sets import ShardSizes, shard_backward, shard_forward
from sppo.cost.live_sets.tensor_sizes import TensorSizes, tensor_sizes


@dataclass(frozen=True, slots=True)
class LiveSet:
    """Name of a point of a pass, and the bytes of the tensors that are live at this point."""

    name: str
    live_bytes: int


@lru_cache(maxsize=1 << 15)
def working_sets(
    workload: Workload,
    *,
    tokens: int,
    prefix: int,
    recomputed: frozenset[int],
    retained: frozenset[int] = frozenset(),
    input_every: int = 1,
    layers: int,
    defers: bool = False,
    shard: ShardSizes | None = None,
) -> tuple[LiveSet, LiveSet]:
    """Return the largest live set of a layer's forward, and of its backward.

    Args:
        workload: Model, machine, dtype and sequence parallelism.
        tokens: Tokens of the subsequence on one device.
        prefix: Tokens of the sequence before the subsequence.
        recomputed: Tensor classes that backward recomputes.
        retained: Tensor classes of which every row stays in memory of torch's allocator.
        input_every: Layers from one saved input to the next.
        layers: Layers of the stage.
        defers: Whether weight halves of backwards are deferred.
        shard: Sizes of the MSP shard that the tokens are; None for a whole subsequence.
    """
    sizes = tensor_sizes(workload, tokens, prefix=prefix, retained=retained, defers=defers)
    forward = _forward(sizes, recomputed=recomputed)
    backward = _backward(sizes, recomputed=recomputed, input_every=input_every, layers=layers)
    if shard is not None:
        forward = starmap(LiveSet, shard_forward(sizes, shard, _named(forward)))
        backward = starmap(LiveSet, shard_backward(sizes, shard, _named(backward)))
    return _largest(forward), _largest(backward)


def most_working_set(
    workload: Workload, *, tokens: int, prefix: int, input_every: int = 1, layers: int
) -> LiveSet:
    """Return an upper bound of :func:`working_sets` for any recomputed classes.

    A forward needs the most memory if all is saved, since saved tensors are copied only when the
    layer ends; a backward if all is recomputed, or if layer inputs and the linear class are.
    """
    sizes = tensor_sizes(workload, tokens, prefix=prefix)
    live_sets = [*_forward(sizes, recomputed=frozenset())]
    for recomputed in (frozenset((ATTENTION, LINEAR)), frozenset((LINEAR,)))[: min(2, input_every)]:
        live_sets += _backward(sizes, recomputed=recomputed, input_every=input_every, layers=layers)
    return _largest(live_sets)


def forward_working_set(workload: Workload, *, tokens: int) -> LiveSet:
    """Return the largest live set of a layer's forward that saves nothing."""
    sizes = tensor_sizes(workload, tokens)
    return _largest(_forward(sizes, recomputed=frozenset((ATTENTION, LINEAR))))


def loss_working_set(workload: Workload, *, tokens: int) -> LiveSet:
    """Return the largest live set of the final norm, the head and the loss, with their backward."""
    return _largest(_loss(tensor_sizes(workload, tokens)))


def _largest(live_sets: Iterable[LiveSet]) -> LiveSet:
    return max(live_sets, key=lambda live_set: live_set.live_bytes)


def _named(live_sets: Iterable[LiveSet]) -> Iterator[tuple[str, int]]:
    return ((live_set.name, live_set.live_bytes) for live_set in live_sets)


def _forward(s: TensorSizes, *, recomputed: frozenset[int]) -> Iterator[LiveSet]:
    layer_forward = cpu_live_sets.layer_forward if s.threads else gpu_live_sets.layer_forward
    return starmap(LiveSet, layer_forward(s, recomputed=recomputed))


def _backward(
    s: TensorSizes, *, recomputed: frozenset[int], input_every: int, layers: int
) -> Iterator[LiveSet]:
    layer_backward = cpu_live_sets.layer_backward if s.threads else gpu_live_sets.layer_backward
    named = layer_backward(s, recomputed=recomputed, input_every=input_every, layers=layers)
    return starmap(LiveSet, named)


def _loss(s: TensorSizes) -> Iterator[LiveSet]:
    return starmap(LiveSet, cpu_live_sets.loss(s) if s.threads else gpu_live_sets.loss(s))
