"""AdamW whose masters and moments live behind the device (``state.optimizer``).

In host memory, or in a file on a disk, they are stepped by torch's fused CPU kernel. A device then
holds weights and gradients alone, 6 bytes a parameter in bf16 instead of 18, or not even these. All
parameters are one long row there, those with weight decay first, cut into buckets. While the CPU
steps one bucket, the gradients of the next come down and the weights of the last go up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from sppo.checkpoint.checkpoint import MODEL_PREFIX
from sppo.config.run import OptimizerConfig
from sppo.cost.memory.stage_memory import UPDATE_SLOTS
from sppo.cost.parameters import is_decayed
from sppo.offload.transfers import Done, Transfers
from sppo.optim.adamw import STEP_KEY, take_over
from sppo.optim.fused_adamw import MOMENTS, FusedAdamW
from sppo.optim.optimizer_rows import WIDE, OptimizerRows

_BUCKET_ELEMENTS = 1 << 24
"""64 MiB of gradients: long copies, and what waits for the first and the last one stays small."""
_SLOTS = UPDATE_SLOTS


@dataclass(frozen=True, slots=True)
class _ParameterRange:
    """A flat range of one parameter within a bucket."""

    name: str
    begin: int
    """First of the parameter's elements."""
    end: int
    offset: int
    """Begin of the range within the bucket, elements."""


@dataclass(frozen=True, slots=True)
class _UpdateBucket:
    """A range of the row of all parameters, all with weight decay or all without."""

    begin: int
    end: int
    weight_decay: float
    parts: tuple[_ParameterRange, ...]

    @property
    def elements(self) -> int:
        return self.end - self.begin


class HostAdamW:
    """AdamW on the host: same update and checkpoint state as :class:`sppo.optim.adamw.AdamW`.

    Between two CPUs results are equal to the last bit, but for elements at the end of a tensor or a
    bucket that do not fill a vector, which the kernel may round otherwise.

    Args:
        weights: what the engine computes with, on its device or behind it, by global name; written
            after every step.
        config: betas, eps, weight decay. Rate and clipping are given at each step.
        rows: of the weights, filled with the fp32 values that they were rounded from.
        transfers: copies of that device.
        bucket_elements: most parameters of a bucket.

    Raises:
        MemoryError: the host has not the memory for what passes through it, or may not lock it.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        config: OptimizerConfig,
        rows: OptimizerRows,
        transfers: Transfers,
        bucket_elements: int = _BUCKET_ELEMENTS,
    ) -> None:
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        assert shapes == rows.shapes, "rows are of the weights"
        self._weights = {name: weight.detach().view(-1) for name, weight in weights.items()}
        self._rows, self._transfers, self._steps = rows, transfers, 0
        self._buckets = _cut(
            rows, weight_decay=config.weight_decay, bucket_elements=bucket_elements
        )
        self._gradients, self._narrow = self._staging()
        self._updates = [self._update(bucket, config) for bucket in self._buckets]
        self._upload_all()

    @property
    def steps(self) -> int:
        """Updates done; steps that were skipped do not count."""
        return self._steps

    @property
    def host_bytes(self) -> int:
        """Memory that it takes behind the device, staging included."""
        return self.row_bytes + self.staging_bytes

    @property
    def row_bytes(self) -> int:
        """Memory of masters and moments."""
        return self._rows.size_bytes

    @property
    def bucket_bytes(self) -> int:
        """Memory that a bucket takes where its masters and moments are in a file."""
        most = max(bucket.elements for bucket in self._buckets)
        return self.staging_bytes + (1 + len(MOMENTS)) * most * WIDE.itemsize

    @property
    def staging_bytes(self) -> int:
        """Memory that gradients and weights of buckets pass through."""
        slots = [*self._gradients, *(part for slot in self._narrow for part in slot.values())]
        return sum(part.numel() * part.element_size() for part in slots)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], *, lr: float) -> None:
        """Make one update (Loshchilov and Hutter, 2019, algorithm 2) and fresh weights.

        Args:
            gradients: one per weight, fp32, on the device; not kept.
            lr: of this step.
        """
        assert gradients.keys() == self._weights.keys(), "a gradient for every weight"
        flat = {name: gradient.view(-1) for name, gradient in gradients.items()}
        coming = self._fetch(0, flat)
        going: list[Done] = []
        for index, (bucket, update) in enumerate(zip(self._buckets, self._updates, strict=True)):
            here = coming
            if index + 1 < len(self._buckets):
                coming = self._fetch(index + 1, flat)
            here.wait()
            update.step([self._gradients[index % _SLOTS][: bucket.elements]], lr=lr)
            if len(going) >= _SLOTS:
                going[-_SLOTS].wait()  # its slot is written next
            going.append(self._upload(index))
            self._rows.forget()
        self._transfers.finish()
        for done in going[-_SLOTS:]:
            done.wait()  # the next step, or a load, writes these slots
        self._steps += 1

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, flat by key, as of :class:`AdamW`; on the host, live."""
        rows = self._rows
        state = {f"{MODEL_PREFIX}{name}": rows.view(rows.masters, name) for name in self._weights}
        for moment, row in zip(MOMENTS, rows.moments, strict=True):
            for name in self._weights:
                state[f"optimizer.{moment}.{name}"] = rows.view(row, name)
        state[STEP_KEY] = torch.tensor(self._steps)
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over ``state``, of another optimizer or this one's own filled in place."""
        self._steps = take_over(self.state(), state)
        for update in self._updates:
            update.set_steps(self._steps)
        self._upload_all()

    def _update(self, bucket: _UpdateBucket, config: OptimizerConfig) -> FusedAdamW:
        rows = (self._rows.masters, *self._rows.moments)
        master, *moments = (row[bucket.begin : bucket.end] for row in rows)
        return FusedAdamW(
            [master],
            [[moment] for moment in moments],
            config=config,
            weight_decay=bucket.weight_decay,
        )

    def _staging(self) -> tuple[list[Tensor], list[dict[torch.dtype, Tensor]]]:
        """Slots for gradients that come down, and for weights that go up, by their dtype."""
        most = max(bucket.elements for bucket in self._buckets)
        dtypes = sorted({weight.dtype for weight in self._weights.values()}, key=str)
        sizes = [WIDE, *dtypes] * _SLOTS
        memory = self._transfers.memory(sum(most * dtype.itemsize for dtype in sizes))
        views, begin = [], 0
        # The widest first, so that every view begins at a multiple of its element.
        order = sorted(range(len(sizes)), key=lambda index: -sizes[index].itemsize)
        for index in order:
            end = begin + most * sizes[index].itemsize
            views.append((index, memory[begin:end].view(sizes[index])))
            begin = end
        parts = [view for _, view in sorted(views, key=lambda item: item[0])]
        slots = [parts[i : i + 1 + len(dtypes)] for i in range(0, len(parts), 1 + len(dtypes))]
        converted = [dict(zip(dtypes, slot[1:], strict=True)) for slot in slots]
        return [slot[0] for slot in slots], converted

    def _fetch(self, index: int, gradients: Mapping[str, Tensor]) -> Done:
        """Start to bring the gradients of one bucket down."""
        slot = self._gradients[index % _SLOTS]
        return self._transfers.down(
            [
                (slot[p.offset : p.offset + p.end - p.begin], gradients[p.name][p.begin : p.end])
                for p in self._buckets[index].parts
            ]
        )

    def _upload(self, index: int) -> Done:
        """Round one bucket's masters, and start to send them to the weights."""
        bucket, slot = self._buckets[index], self._narrow[index % _SLOTS]
        masters = self._rows.masters
        copies = []
        for part in bucket.parts:
            target = self._weights[part.name][part.begin : part.end]
            place = part.offset, part.offset + part.end - part.begin
            staged = slot[target.dtype][place[0] : place[1]]
            staged.copy_(masters[bucket.begin + place[0] : bucket.begin + place[1]])
            copies.append((target, staged))
        return self._transfers.up(copies)

    @torch.no_grad()
    def _upload_all(self) -> None:
        for index in range(len(self._buckets)):
            self._upload(index).wait()
            self._rows.forget()
        self._transfers.finish()


def _cut(rows: OptimizerRows, *, weight_decay: float, bucket_elements: int) -> list[_UpdateBucket]:
    """Return the buckets that the rows are cut into."""
    assert bucket_elements > 0, "a bucket holds something"
    buckets: list[_UpdateBucket] = []
    begin = 0
    for decayed in (True, False):
        names = [name for name in rows.begins if is_decayed(rows.shapes[name]) == decayed]
        first, begin = begin, begin + sum(prod(rows.shapes[name]) for name in names)
        for start in range(first, begin, bucket_elements):
            end = min(start + bucket_elements, begin)
            parts = tuple(_parts(rows, names, start=start, end=end))
            buckets.append(_UpdateBucket(start, end, weight_decay if decayed else 0.0, parts))
    return buckets


def _parts(
    rows: OptimizerRows, names: Sequence[str], *, start: int, end: int
) -> list[_ParameterRange]:
    """Return the parameters that lie between `start` and `end` of a row, each with its range."""
    found = []
    for name in names:
        place, size = rows.begins[name], prod(rows.shapes[name])
        begin, stop = max(start, place), min(end, place + size)
        if begin < stop:
            found.append(_ParameterRange(name, begin - place, stop - place, begin - start))
    return found
