"""AdamW on the CPU, with masters and moments in host memory or on a disk (``state.optimizer``).

torch's fused CPU kernel updates the masters. The device then holds only weights and gradients, 6
bytes per parameter in bf16 instead of 18, or less if these are streamed, too. Masters, and each of
the moments, are one long row of all parameters, cut into buckets of one learning rate and weight
decay, for which the parameters are in the order of these.
While the CPU updates one bucket, the gradients of the next bucket are copied from the device and
the weights of the previous bucket to the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from math import prod

import torch
from torch import Tensor

from sppo.config.optimizer import OptimizerConfig
from sppo.cost.memory.state_memory import UPDATE_SLOTS
from sppo.cost.parameter_groups import UpdateRule, by_update_rule, update_rule
from sppo.offload.lane import Lane
from sppo.offload.state_memory import StateMemory
from sppo.offload.worker_pool import Event, wait_for
from sppo.optim.adamw import MasterState
from sppo.optim.fused_adamw import MOMENTS, FusedAdamW
from sppo.parallel.flat_row import FlatRow, RowPart, Shapes

MASTER_DTYPE = torch.float32
_BUCKET_ELEMENTS = 1 << 24
"""64 MiB of gradients: large enough for fast copies, small enough that the copies of the first and
the last bucket, which nothing overlaps, are short."""


class OptimizerRows:
    """Masters and moments of parameters, each one long row, zero at first; masters are fp32.

    The rows are allocated before the weights are made, so each master is written in place, and
    startup needs memory only for the rows and the parameters being made.

    Args:
        shapes: Shapes of the parameters, or of the intervals that this rank updates, by global
            name.
        config: Optimizer configuration, with the groups by which parameters are ordered, and the
            precision of moments.
        memory: Allocator of the rows; None for host memory that is not page-locked.

    Raises:
        MemoryError: The host lacks memory.
        OSError: The disk lacks space.
    """

    def __init__(
        self, shapes: Shapes, *, config: OptimizerConfig, memory: StateMemory | None = None
    ) -> None:
        names = chain.from_iterable(by_update_rule(shapes, config).values())
        self.layout = FlatRow({name: shapes[name] for name in names})
        self._memory = memory or StateMemory()
        shape = (self.layout.elements,)
        narrow = torch.bfloat16 if config.moments == "bf16" else MASTER_DTYPE
        self.masters = self._memory.tensors({"masters": shape}, MASTER_DTYPE)["masters"]
        self.moments = [*self._memory.tensors(dict.fromkeys(MOMENTS, shape), narrow).values()]

    def fill(self, masters: Mapping[str, Tensor]) -> None:
        """Copy masters of parameters, by global name, into the row of masters."""
        for name, master in masters.items():
            self.layout.view(self.masters, name).copy_(master)
            self.drop_pages()

    def drop_pages(self) -> None:
        """Allow the tier to drop cached pages: the rows are not used for a while."""
        self._memory.drop_pages()


@dataclass(frozen=True, slots=True)
class _UpdateBucket:
    """Range of the row of all parameters that are updated by one rule."""

    begin: int
    end: int
    rule: UpdateRule
    parts: tuple[RowPart, ...]

    @property
    def elements(self) -> int:
        return self.end - self.begin


class HostAdamW(MasterState):
    """AdamW on the host: same update and checkpoint state as :class:`sppo.optim.adamw.AdamW`.

    If both run on a CPU, results are bitwise equal, except for elements at the end of a tensor or a
    bucket that do not fill a vector, which the kernel may round differently.

    Args:
        weights: Weights that the engine computes with, on its device or in another tier, by global
            name; every step writes them.
        config: Optimizer configuration, of which betas, eps and weight decay are used.
        rows: Masters and moments of the weights, with masters set to the fp32 values that the
            weights were rounded from.
        lane: Lane between the weights' device and the host.
        bucket_elements: Most elements of a bucket.

    Raises:
        MemoryError: The host lacks memory for the staging slots, or may not page-lock them.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        config: OptimizerConfig,
        rows: OptimizerRows,
        lane: Lane,
        bucket_elements: int = _BUCKET_ELEMENTS,
    ) -> None:
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        assert shapes == rows.layout.shapes, "rows are of the weights"
        moments = zip(MOMENTS, map(rows.layout.views, rows.moments), strict=True)
        super().__init__(rows.layout.views(rows.masters), dict(moments))
        self._weights = {name: weight.detach().view(-1) for name, weight in weights.items()}
        self._rows, self._lane = rows, lane
        self._buckets = _cut(rows, config=config, bucket_elements=bucket_elements)
        self._gradients, self._weight_slots = self._staging()
        self._updates = [self._update(bucket, config) for bucket in self._buckets]
        self._compute_weights()

    @property
    def row_bytes(self) -> int:
        """Bytes of masters and moments."""
        return sum(row.nbytes for row in (self._rows.masters, *self._rows.moments))

    @property
    def bucket_bytes(self) -> int:
        """Bytes of host memory in use at once if the rows are in a file: a bucket and staging."""
        most = max(bucket.elements for bucket in self._buckets)
        rows = (self._rows.masters, *self._rows.moments)
        return self.staging_bytes + most * sum(row.element_size() for row in rows)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging slots for gradients and weights of buckets."""
        slots = self._gradients, self._weight_slots
        return sum(slot.numel() * slot.element_size() for slot in slots)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], *, lr: float) -> None:
        """Update masters and weights once (Loshchilov and Hutter, 2019, algorithm 2).

        Args:
            gradients: Gradient of each weight by global name, fp32, on the device; not kept.
            lr: Learning rate of this step.
        """
        assert gradients.keys() == self._weights.keys(), "a gradient for every weight"
        flat = {name: gradient.view(-1) for name, gradient in gradients.items()}
        coming = self._fetch(0, flat)
        going: list[Event] = []
        for index, (bucket, update) in enumerate(zip(self._buckets, self._updates, strict=True)):
            here = coming
            if index + 1 < len(self._buckets):
                coming = self._fetch(index + 1, flat)
            wait_for(here)
            update.step([self._gradients[index % UPDATE_SLOTS][: bucket.elements]], lr=lr)
            if len(going) >= UPDATE_SLOTS:
                wait_for(going[-UPDATE_SLOTS])  # its slot is reused for this bucket
            going.append(self._upload(index))
            self._rows.drop_pages()
        for done in going[-UPDATE_SLOTS:]:
            wait_for(done)  # the next step, or load_state, reuses these slots
        self._steps += 1

    def _update(self, bucket: _UpdateBucket, config: OptimizerConfig) -> FusedAdamW:
        rows = (self._rows.masters, *self._rows.moments)
        master, *moments = (row[bucket.begin : bucket.end] for row in rows)
        return FusedAdamW(
            [master],
            [[moment] for moment in moments],
            config=config,
            rule=bucket.rule,
        )

    def _staging(self) -> tuple[Tensor, Tensor]:
        """Allocate staging slots, one per row, for the gradients and for the weights of buckets."""
        shape = UPDATE_SLOTS, max(bucket.elements for bucket in self._buckets)
        dtype = next(iter(self._weights.values())).dtype
        behind_gradients = prod(shape) * MASTER_DTYPE.itemsize
        size_bytes = behind_gradients + prod(shape) * dtype.itemsize
        memory = self._lane.host_memory("updates", size_bytes)
        gradients, weights = memory[:behind_gradients], memory[behind_gradients:size_bytes]
        return gradients.view(MASTER_DTYPE).view(shape), weights.view(dtype).view(shape)

    def _fetch(self, index: int, gradients: Mapping[str, Tensor]) -> Event:
        """Start to copy the gradients of one bucket from the device to its slot."""
        slot = self._gradients[index % UPDATE_SLOTS]
        copies = [
            (slot[part.within], gradients[part.name][part.elements])
            for part in self._buckets[index].parts
        ]
        return self._lane.out(copies, after=[self._lane.computed([])])

    def _upload(self, index: int) -> Event:
        """Round one bucket's masters into its slot, and start to copy them to the weights."""
        bucket, slot = self._buckets[index], self._weight_slots[index % UPDATE_SLOTS]
        masters = self._rows.masters[bucket.begin : bucket.end]
        copies = []
        for part in bucket.parts:
            staged = slot[part.within]
            staged.copy_(masters[part.within])
            copies.append((self._weights[part.name][part.elements], staged))
        return self._lane.back(copies, after=[self._lane.computed([])])

    @torch.no_grad()
    def _compute_weights(self) -> None:
        for index in range(len(self._buckets)):
            wait_for(self._upload(index))
            self._rows.drop_pages()


def _cut(
    rows: OptimizerRows, *, config: OptimizerConfig, bucket_elements: int
) -> list[_UpdateBucket]:
    """Cut the rows into buckets, each of parameters with the same rule."""
    assert bucket_elements > 0, "a bucket holds something"
    buckets: list[_UpdateBucket] = []
    end = 0
    for rule, names in groupby(rows.layout.shapes, key=lambda name: update_rule(name, config)):
        first, end = end, end + sum(prod(rows.layout.shapes[name]) for name in names)
        for begin in range(first, end, bucket_elements):
            last = min(begin + bucket_elements, end)
            parts = tuple(rows.layout.parts(slice(begin, last)))
            buckets.append(_UpdateBucket(begin, last, rule, parts))
    return buckets
