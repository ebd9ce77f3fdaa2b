"""Reduction of gradients, once per step, and gathering of updated weights, in buckets (ZeRO-0, 1).

With ZeRO-1 (Rajbhandari et al., 2020) each of n ranks that hold the same parameters updates 1/n of
the rows of each parameter. Gradients are reduced to the rank that updates them, and updated weights
are gathered, bucket by bucket, so that messages in flight take the memory of a few buckets only.
From ZeRO-2 on, gradients are reduced after each use instead
(:mod:`sppo.parallel.shard_messages`).

The ranks with the same stage are its data-parallel replicas and, with Ulysses, the
sequence-parallel ranks: all of them use the same weights for different tokens. With Megatron,
sequence-parallel ranks hold shards of most parameters, so there is one group per kind of parameter
(:mod:`sppo.optim.sharded_state`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.cost.sharding.collectives import REDUCE_BUCKET_BYTES, REDUCE_BUCKETS
from sppo.parallel.collectives import all_gather, reduce_scatter
from sppo.parallel.job.peer_errors import peer_errors
from sppo.parallel.row_layout import RowLayout, Shapes, rows_of


class GradientReducer:
    """Reduces gradients and gathers weights among the ranks that hold the same parameters.

    Args:
        group: Ranks that hold the same parameters; None if this rank is alone.
        shapes: Shapes of the parameters by global name.
        shards_state: Whether each rank updates only its own rows (ZeRO-1) or all rows (ZeRO-0).
        bucket_bytes: Size of a bucket with the rows of all ranks, in fp32.
        device: Device whose tensors the group carries; None if weights and gradients already live
            on this device.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        *,
        shapes: Shapes,
        shards_state: bool = True,
        bucket_bytes: int = REDUCE_BUCKET_BYTES,
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self._group, self._shapes = group, dict(shapes)
        self._index = 0 if group is None else group.rank()
        self._count = 1 if group is None else group.size()
        self.shards_state = shards_state and self._count > 1
        self._bucket_elements = max(1, bucket_bytes // 4 // self._count)
        self._under_way: deque[tuple[Any, Callable[[], None]]] = deque()

    def own_rows(self, name: str) -> slice:
        """Return the rows of a parameter that this rank updates."""
        rows = self._shapes[name][0]
        return self.counted_rows(name) if self.shards_state else slice(0, rows)

    def counted_rows(self, name: str) -> slice:
        """Return the rows that this rank adds to global sums; no other rank adds these rows."""
        return rows_of(self._shapes[name][0], index=self._index, count=self._count)

    def reduce(self, gradients: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Start to sum gradients over the group; the last buckets are in flight until :meth:`wait`.

        Args:
            gradients: Gradients by global name; after :meth:`wait`, :meth:`own_rows` of each are
                complete, and other rows are undefined.
            names: Names of the gradients to sum.
        """
        if self._group is None:
            return
        for bucket in self._buckets(names):
            self._wait_for(REDUCE_BUCKETS - 1)
            self._reduce_bucket(bucket, gradients)

    def gather(self, weights: Mapping[str, Tensor]) -> None:
        """Fill the rows of ``weights`` that other ranks have updated, and wait for completion.

        Args:
            weights: Weights by global name, with :meth:`own_rows` up to date.
        """
        if not self.shards_state:
            return
        for bucket in self._buckets(weights):
            self._wait_for(REDUCE_BUCKETS - 1)
            own_N = weights[bucket.parts[0].name].new_zeros(bucket.elements)
            for part in bucket.parts:
                part.own(own_N, self._index).copy_(weights[part.name][part.rows(self._index)])
            own_N = own_N if self._device is None else own_N.to(self._device)
            flat_RN = own_N.new_empty((self._count, bucket.elements))
            with peer_errors("gathering weights"):
                work = all_gather(flat_RN.view(-1), own_N, group=self._group, async_op=True)
            self._under_way.append((work, partial(_fill, weights, bucket, flat_RN)))
        self.wait()

    def wait(self) -> None:
        """Wait until all started reductions and gathers are done."""
        self._wait_for(0)

    def _wait_for(self, most: int) -> None:
        """Wait until at most ``most`` buckets are in flight."""
        while len(self._under_way) > most:
            work, finish = self._under_way.popleft()
            with peer_errors("reducing gradients or gathering weights"):
                work.wait()
            finish()

    def _reduce_bucket(self, bucket: RowLayout, gradients: Mapping[str, Tensor]) -> None:
        first = gradients[bucket.parts[0].name]
        flat_RN = first.new_zeros((self._count, bucket.elements))
        for part in bucket.parts:
            for sent, rows in part.pairs(flat_RN, gradients[part.name]):
                sent.copy_(rows)
        finish: Callable[[], None]
        with peer_errors("reducing gradients"):
            if self.shards_state:
                own_N = flat_RN.new_empty(bucket.elements)
                work = reduce_scatter(own_N, flat_RN.view(-1), group=self._group, async_op=True)
                finish = partial(self._fill_own, gradients, bucket, own_N)
            else:
                work = dist.all_reduce(flat_RN, group=self._group, async_op=True)
                finish = partial(_fill, gradients, bucket, flat_RN)
        self._under_way.append((work, finish))

    def _fill_own(self, tensors: Mapping[str, Tensor], bucket: RowLayout, own_N: Tensor) -> None:
        """Copy this rank's part of a message into the parameters."""
        for part in bucket.parts:
            tensors[part.name][part.rows(self._index)] = part.own(own_N, self._index)

    def _buckets(self, names: Iterable[str]) -> Iterator[RowLayout]:
        """Yield the layouts of messages of about equal size with all rows of the parameters."""
        shapes = {name: self._shapes[name] for name in names}
        return RowLayout.of(shapes, ranks=self._count).cut(self._bucket_elements)


def _fill(tensors: Mapping[str, Tensor], bucket: RowLayout, flat_RN: Tensor) -> None:
    """Copy all ranks' parts of a message into the parameters."""
    for part in bucket.parts:
        for sent, rows in part.pairs(flat_RN, tensors[part.name]):
            rows.copy_(sent)


def add_up(
    tensors: Sequence[Tensor],
    group: ProcessGroup | None,
    *,
    what: str,
    device: torch.device | None = None,
) -> None:
    """Replace tensors by their sums over ``group``, in place.

    Args:
        tensors: Tensors to sum.
        group: Ranks to sum over; None does nothing.
        what: Description of the operation in error messages.
        device: Device whose tensors the group carries; None if the tensors live on this device.
    """
    if group is None:
        return
    with peer_errors(what):
        for tensor in tensors:
            total = tensor.contiguous()
            total = total if device is None else total.to(device)
            dist.all_reduce(total, group=group)
            if total is not tensor:
                tensor.copy_(total)
