"""Ranks that hold the same stage: gradients are reduced once a step, the optimizer is sharded.

With ZeRO-1 (Rajbhandari et al., 2020) every one of n ranks updates the n-th part of the rows of
each parameter. (From ZeRO-2 on gradients are reduced after each use instead:
:mod:`sppo.parallel.gradient_reduce_scatter`.) Gradients are reduced to the rank that needs them and
updated weights gathered from the rank that made them, bucket by bucket, so that what is under way
never takes more than a few buckets.

Ranks of one stage are its data-parallel replicas and, with Ulysses, the ranks over which tokens are
sharded: both see some of the tokens with the same weights. With Megatron the ranks over which
tokens are sharded hold parts of most parameters, so there is a group for each kind
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
    """Rows of rank ``index`` when sharded over ``count`` ranks: as equal as they can be."""
    return slice(num_rows * index // count, num_rows * (index + 1) // count)


@dataclass(frozen=True, slots=True)
class _ParameterRows:
    """Rows ``begin`` to ``end`` of every rank's rows of a parameter."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _GradientBucket:
    """Rows that are reduced together, and how many elements every rank has of them at most."""

    parts: tuple[_ParameterRows, ...]
    elements: int


class GradientReducer:
    """The ranks that hold the same stages, and this rank's shard of the state.

    Args:
        group: of these ranks; None for a rank that is alone.
        index: this rank's place among them.
        shapes: parameters of this rank's stages by global name.
        shards_state: whether each rank updates only its rows (ZeRO-1) or everything (ZeRO-0).
        bucket_bytes: of the rows of all ranks in a bucket, in fp32.
        device: whose tensors the group carries; None: those of weights and gradients, which then
            are there.
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
        """Rows of a parameter that this rank updates."""
        rows = self._shapes[name][0]
        return self.counted_rows(name) if self.shards_state else slice(0, rows)

    def counted_rows(self, name: str) -> slice:
        """Rows that this rank counts in sums over all parameters: no two ranks count the same."""
        return rows_of(self._shapes[name][0], index=self.index, count=self.count)

    def reduce(self, gradients: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Begin to add up gradients, waiting for all but the last buckets; :meth:`wait` ends it.

        Args:
            gradients: by global name; afterwards right in :meth:`own_rows`.
            names: of those to add up.
        """
        if self._group is None:
            return
        for bucket in self._buckets(names):
            self._wait_for(REDUCE_BUCKETS - 1)
            flat = self._flat(bucket, gradients, ranks=range(self.count))
            self._reduce_bucket(bucket, flat, gradients)

    def gather(self, weights: Mapping[str, Tensor]) -> None:
        """Fetch the rows of ``weights`` that other ranks have updated; returns when they are here.

        Args:
            weights: by global name, right in :meth:`own_rows`.
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
        """Return when all that was begun is done."""
        self._wait_for(0)

    def _wait_for(self, most: int) -> None:
        """Let at most so many buckets be under way."""
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
        """Parameters, the long ones cut, in buckets of about equal size."""
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
        """Return ``[ranks, elements]``: the ranks' rows one behind the other, padded with zeros."""
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
        """Return a function that puts ``flat`` of the given ranks (all) back into the tensors."""

        def spread() -> None:
            for row, rank in enumerate(range(self.count) if ranks is None else ranks):
                for place, rows, part in self._places(bucket, rank):
                    target = tensors[part.name][rows]
                    target.copy_(flat[row, place].view_as(target))

        return spread

    def _places(
        self, bucket: _GradientBucket, rank: int
    ) -> Iterable[tuple[slice, slice, _ParameterRows]]:
        """Return (elements of the bucket, rows of the parameter, part of the bucket) of a rank."""
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
        tensors: to replace.
        group: None adds nothing.
        what: errors call it.
        device: whose tensors the group carries; None: the tensors'.
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
