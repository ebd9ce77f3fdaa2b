"""Collectives on the flat rows of weight parts: per use, or once per step in buckets.

With ZeRO-2 and 3 (Rajbhandari et al., 2020), a row is gathered or reduced as a whole around each
use of its part (:class:`RowMessage`), while another part computes. With ZeRO-0 and 1 gradients are
reduced, and updated weights are gathered, once per step and in buckets (:class:`RowBuckets`), so
that messages in flight take the memory of a few buckets only. A row is ``[R, N]``: the interval of
rank r of R is row r.

The ranks with the same stage are its data-parallel replicas and, with Ulysses, the
sequence-parallel ranks: all of them use the same weights for different tokens. With Megatron,
sequence-parallel ranks hold shards of most parameters, so there is one group per kind of parameter
(:mod:`sppo.optim.sharded_state`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.cost.sharding.collectives import REDUCE_BUCKET_BYTES, REDUCE_BUCKETS
from sppo.parallel.collectives import all_gather, reduce_scatter
from sppo.parallel.flat_row import FlatRow


class RowMessage:
    """Whole row of a part that is being gathered or reduced.

    Args:
        key: Name of the row.
        layout: Layout of the row.
        group: Communicator of the ranks over which the row is sharded. Nothing else may use it
            while a message is in flight, and every rank must send the same messages in order.
        whole: The whole row, padded.
    """

    def __init__(self, key: str, layout: FlatRow, group: ProcessGroup, *, whole: Tensor) -> None:
        self.key, self.layout, self.whole, self._group = key, layout, whole, group
        self._work: Any = None

    def gather(self, shard: Tensor) -> None:
        """Start to fill the row with the shards of all ranks."""
        self._work = all_gather(self.whole, shard, group=self._group, async_op=True)

    def reduce(self) -> None:
        """Start to sum the row over the ranks; afterwards only this rank's interval is defined."""
        own = self.whole[self.layout.own]
        self._work = reduce_scatter(own, self.whole, group=self._group, async_op=True)

    def wait(self) -> Tensor:
        """Wait until the message is done, and return the row."""
        self._work.wait()
        return self.whole


class RowBuckets:
    """Reduces rows of gradients and gathers rows of weights among the ranks that hold the same.

    Args:
        group: Ranks that hold the same parameters; None if this rank is alone.
        shards_state: Whether each rank updates only its own interval (ZeRO-1) or all (ZeRO-0).
        bucket_bytes: Size of a bucket with the intervals of all ranks, in fp32.
        device: Device whose tensors the group carries.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        *,
        shards_state: bool = True,
        bucket_bytes: int = REDUCE_BUCKET_BYTES,
        device: torch.device,
    ) -> None:
        self._group, self._device = group, device
        self._rank, self._ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._shards_state = shards_state
        self._bucket_elements = max(1, bucket_bytes // 4 // self._ranks)
        self._under_way: deque[tuple[Any, Callable[[], object]]] = deque()

    def reduce(self, row: Tensor) -> None:
        """Start to sum a row over the group; the last buckets are in flight until :meth:`wait`.

        After that the interval that this rank updates is complete, and others are undefined.
        """
        for part_RN in self._parts(row):
            bucket_RN = part_RN.contiguous()
            if self._shards_state:
                sums, target = bucket_RN[self._rank], part_RN[self._rank]
                work = reduce_scatter(sums, bucket_RN.view(-1), group=self._group, async_op=True)
            else:
                sums, target = bucket_RN, part_RN
                work = dist.all_reduce(sums, group=self._group, async_op=True)
            self._under_way.append((work, partial(target.copy_, sums)))

    def gather(self, row: Tensor) -> None:
        """Start to fill the intervals of a row that other ranks have updated, as :meth:`reduce`."""
        if not self._shards_state:
            return
        for part_RN in self._parts(row):
            own_N = part_RN[self._rank].to(self._device)
            bucket_RN = own_N.new_empty(part_RN.shape)
            work = all_gather(bucket_RN.view(-1), own_N, group=self._group, async_op=True)
            self._under_way.append((work, partial(part_RN.copy_, bucket_RN)))

    def wait(self) -> None:
        """Wait until all started reductions and gathers are done."""
        self._wait_for(0)

    def _wait_for(self, most: int) -> None:
        """Wait until at most ``most`` buckets are in flight."""
        while len(self._under_way) > most:
            work, finish = self._under_way.popleft()
            work.wait()
            finish()

    def _parts(self, row: Tensor) -> Iterator[Tensor]:
        """Yield what each bucket has of a row, when there is room for a bucket."""
        if self._group is None:
            return
        for part_RN in torch.split(row.view(self._ranks, -1), self._bucket_elements, dim=1):
            self._wait_for(REDUCE_BUCKETS - 1)
            yield part_RN
