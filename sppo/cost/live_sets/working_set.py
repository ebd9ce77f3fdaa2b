"""Working set: exact memory of the running subsequence, without saved tensors.

Every tensor of :mod:`sppo.model.layer`, :mod:`sppo.kernels` and the head has a name and a size. A
live set of a pass is the tensors that are live at a time, and the working set is the largest live
set, see :mod:`sppo.cost.live_sets.layer_live_sets`. An
MSP shard has more live tensors (:mod:`sppo.cost.live_sets.shard_live_sets`). Saved tensors are not
counted: they have a bucket of their own, from which backward reads them in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from operator import itemgetter

import numpy as np

from sppo.activations.placement import Counts
from sppo.cost.layer_kinds import LayerKind
from sppo.cost.live_sets.layer_live_sets import layer_backward, layer_forward, loss
from sppo.cost.live_sets.shard_live_sets import ShardSizes, shard_backward, shard_forward
from sppo.cost.live_sets.tensor_sizes import LiveSet, TensorSizes
from sppo.cost.tiles import MAX_BACKWARD_KEYS, MAX_FORWARD_ELEMENTS, MAX_FULL_KEYS
from sppo.cost.workload import Workload


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
    kind: LayerKind | None = None,
    recomputes_windows: bool = False,
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
        kind: Window and adapters of the layer, and what trains in it; None for those of the last
            layer.
        recomputes_windows: Whether layers with a window recompute K and V in backward.
    """
    sizes = TensorSizes(
        workload,
        tokens,
        prefix,
        retained,
        defers=defers,
        kind=kind,
        recomputes_windows=recomputes_windows,
        is_shard=shard is not None,
    )
    forward = layer_forward(sizes, recomputed=recomputed)
    backward = layer_backward(sizes, recomputed=recomputed, input_every=input_every, layers=layers)
    if shard is not None:
        forward = shard_forward(sizes, shard, forward)
        backward = shard_backward(sizes, shard, backward)
    return _largest(forward), _largest(backward)


def same_prefixes(workload: Workload, *, tokens: Counts, prefixes: Counts) -> Counts:
    """Return the shortest prefixes with the working sets of `prefixes`, where these are long.

    Attention reads a long prefix in parts of one size, and a window no further back. Where the keys
    are too many for one call, the outputs of parts are merged.
    """
    sizes = TensorSizes(workload, 1)
    long = max(MAX_BACKWARD_KEYS, MAX_FULL_KEYS, workload.model.sliding_window or 0)
    of_a_call = MAX_FORWARD_ELEMENTS * sizes.element_bytes // sizes.key_row_bytes
    in_parts = np.where(prefixes + tokens <= of_a_call, long, max(long, of_a_call))
    shortest: Counts = np.where(prefixes <= long, prefixes, in_parts)
    return shortest


@lru_cache(maxsize=1 << 12)
def loss_working_set(workload: Workload, *, tokens: int) -> LiveSet:
    """Return the largest live set of the final norm, the head and the loss, with their backward."""
    return _largest(loss(TensorSizes(workload, tokens)))


def _largest(live_sets: Iterable[LiveSet]) -> LiveSet:
    return max(live_sets, key=itemgetter(1))
