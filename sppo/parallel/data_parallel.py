"""Reduction of gradients, once per step, and gathering of updated weights, in buckets (ZeRO-0, 1).

With ZeRO-1 (Rajbhandari et al., 2020) each of n ranks that hold the same parameters updates 1/n of
the rows of each parameter. Gradients are reduced to the rank that updates them, and updated weights
are gathered, bucket by bucket, so that messages in flight take the memory of a few buckets only.
From ZeRO-2 on, gradients are reduced after each use instead
(:mod:`sppo.parallel.gradient_reduce_scatter`).

The ranks with the same stage are its data-parallel replicas and, with Ulysses, the
sequence-parallel ranks: all of them use the same weights for different tokens. With Megatron,
sequence-parallel ranks hold shards of most parameters, so there is one group per kind of parameter
(:mod:`sppo.optim.sharded_state`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.cost.sharding.collectives import REDUCE_BUCKET_BYTES, REDUCE_BUCKETS
from sppo.parallel.collectives import all_gather, reduce_scatter
from sppo.parallel.job.peer_errors import peer_errors


def rows_of(num_rows: int, *, index: int, count: int) -> slice:
    """Return the rows of rank ``index`` of ``count`` ranks, with shards as equal as possible."""
    return slice(num_rows * index // count, num_rows * (index + 1) // count)


@dataclass(frozen=True, slots=True)
class _ParameterRows:
    """Range ``[begin, end)`` within each rank's rows of one parameter."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _GradientBucket:
    """Rows that are reduced together, and the most elements of any rank's part of them."""

    parts: tuple[_ParameterRows, ...]
    elements: int


class GradientReducer:
    """Reduces gradients and gathers weights among the ranks that hold the same parameters.

    Args:
        group: Ranks that hold the same parameters; None if this rank is alone.
        index: Index of this rank in the group.
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
        index: int,
        shapes: Mapping[str, tuple[int, ...]],
        shards_state: bool = True,
        bucket_bytes: int = REDUCE_BUCKET_BYTES,
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self._group, self.index, self._shapes = group, index, dict(shapes)
        self.count = 1 if group is None else group.size()
        self.shards_state = shards_state and self.count > 1
        self._bucket_elements = max(1, bucket_bytes // 4 // self.count)
        self._under_way: deque[tuple[Any, Callable[[], None]]] = deque()

    def own_rows(self, name: str) -> slice:
        """Return the rows of a parameter that this rank updates."""
        rows = self._shapes[name][0]
        return self.counted_rows(name) if self.shards_state else slice(0, rows)

    def counted_rows(self, name: str) -> slice:
        """Return the rows that this rank adds to global sums; no other rank adds these rows."""
        return rows_of(self._shapes[name][0], index=self.index, count=self.count)

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
            flat = self._flat(bucket, gradients, ranks=range(self.count))
            self._reduce_bucket(bucket, flat, gradients)

    def gather(self, weights: Mapping[str, Tensor]) -> None:
        """Fill the rows of ``weights`` that other ranks have updated, and wait for completion.

        Args:
            weights: Weights by global name, with :meth:`own_rows` up to date.
        """
        if not self.shards_state:
            return
        for names in _by_dtype(weights).values():
            for bucket in self._buckets(names):
                self._wait_for(REDUCE_BUCKETS - 1)
                own = self._flat(bucket, weights, ranks=[self.index])
                own = own if self._device is None else own.to(self._device)
                everything = own.new_empty((self.count, bucket.elements))
                with peer_errors("gathering weights"):
                    work = all_gather(
                        everything.view(-1), own.view(-1), group=self._group, async_op=True
                    )
                self._under_way.append((work, self._spread(bucket, everything, weights)))
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

    def _reduce_bucket(
        self, bucket: _GradientBucket, flat: Tensor, gradients: Mapping[str, Tensor]
    ) -> None:
        with peer_errors("reducing gradients"):
            if self.shards_state:
                own = flat.new_empty((1, bucket.elements))
                work = reduce_scatter(own.view(-1), flat.view(-1), group=self._group, async_op=True)
                finish = self._spread(bucket, own, gradients, ranks=[self.index])
            else:
                work = dist.all_reduce(flat, group=self._group, async_op=True)
                finish = self._spread(bucket, flat, gradients)
        self._under_way.append((work, finish))

    def _buckets(self, names: Iterable[str]) -> list[_GradientBucket]:
        """Return the parameters, long ones cut, grouped into buckets of about equal size."""
        buckets: list[_GradientBucket] = []
        parts: list[_ParameterRows] = []
        elements = 0
        for part in self._parts(names):
            size = (part.end - part.begin) * prod(self._shapes[part.name][1:])
            if parts and elements + size > self._bucket_elements:
                buckets.append(_GradientBucket(tuple(parts), elements))
                parts, elements = [], 0
            parts.append(part)
            elements += size
        return [*buckets, _GradientBucket(tuple(parts), elements)] if parts else buckets

    def _parts(self, names: Iterable[str]) -> Iterable[_ParameterRows]:
        for name in names:
            rows, *rest = self._shapes[name]
            most = -(-rows // self.count)
            step = max(1, self._bucket_elements // max(1, prod(rest)))
            for begin in range(0, most, step):
                yield _ParameterRows(name, begin, min(begin + step, most))

    def _flat(
        self, bucket: _GradientBucket, tensors: Mapping[str, Tensor], *, ranks: Sequence[int]
    ) -> Tensor:
        """Return a bucket's rows of each given rank, padded with zeros, ``[ranks, elements]``."""
        first = tensors[bucket.parts[0].name]
        flat = first.new_zeros((len(ranks), bucket.elements))
        for row, rank in enumerate(ranks):
            for place, rows, part in self._places(bucket, rank):
                flat[row, place] = tensors[part.name][rows].reshape(-1)
        return flat

    def _spread(
        self,
        bucket: _GradientBucket,
        flat: Tensor,
        tensors: Mapping[str, Tensor],
        *,
        ranks: Sequence[int] | None = None,
    ) -> Callable[[], None]:
        """Return a function that copies ``flat`` of the given ranks (or all) into the tensors."""

        def spread() -> None:
            for row, rank in enumerate(range(self.count) if ranks is None else ranks):
                for place, rows, part in self._places(bucket, rank):
                    target = tensors[part.name][rows]
                    target.copy_(flat[row, place].view_as(target))

        return spread

    def _places(
        self, bucket: _GradientBucket, rank: int
    ) -> Iterable[tuple[slice, slice, _ParameterRows]]:
        """Yield (elements in the bucket, rows of the parameter, part) for each part of a rank."""
        offset = 0
        for part in bucket.parts:
            rows, *rest = self._shapes[part.name]
            width = prod(rest)
            own = rows_of(rows, index=rank, count=self.count)
            begin = min(own.start + part.begin, own.stop)
            end = min(own.start + part.end, own.stop)
            if end > begin:
                yield slice(offset, offset + (end - begin) * width), slice(begin, end), part
            offset += (part.end - part.begin) * width


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


def _by_dtype(tensors: Mapping[str, Tensor]) -> dict[torch.dtype, list[str]]:
    names: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(tensor.dtype, []).append(name)
    return names
