"""Gradient sums whose flat rows are sharded over ranks; a part is whole until it is reduced.

ZeRO-2 (Rajbhandari et al., 2020). While one layer's gradients are computed, those of the previous
layer are being reduced.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.engine.providers.row_views import Rows
from sppo.engine.providers.sharded_parts import ShardedParts
from sppo.engine.providers.weights import WeightPart
from sppo.parallel.flat_row import FlatRow
from sppo.parallel.row_messages import RowMessage


class ShardedGradients(ShardedParts):
    """Provider of gradient sums that are sharded over ranks.

    Implements :class:`sppo.engine.providers.gradients.GradientProvider`. Gradients are added to
    this rank's shard of the sums.
    """

    def __init__(
        self,
        shards: Rows,
        *,
        layouts: Mapping[str, FlatRow],
        groups: Mapping[str, ProcessGroup],
    ) -> None:
        super().__init__(shards, layouts=layouts, groups=groups)
        self._taken: dict[str, Tensor] = {}
        self._taken_part: WeightPart | None = None
        self._forming: list[RowMessage] = []
        self._under_way: list[RowMessage] = []

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return tensors to add the gradients of ``part`` to: zeros, or unsharded sums."""
        assert self._taken_part is None, f"{part} is taken before {self._taken_part} is released"
        if self._under_way_bytes() + self._part_bytes[part] > self.room_bytes:
            self._finish()
        self._taken_part, self._forming = part, self._messages(part, torch.zeros)
        self._taken = self._views(part, self._forming)
        self._count(self._under_way_bytes() + self._part_bytes[part])
        return self._taken

    def release(self, part: WeightPart) -> None:
        """Start to reduce the gradients of ``part``, after earlier reductions are finished."""
        assert part == self._taken_part, f"{part} is released, {self._taken_part} was taken"
        self._finish()
        self._taken.clear()  # the stage holds the same dict: frees the tensors in any case
        self._taken_part = None
        for message in self._forming:
            message.reduce()
        self._under_way, self._forming = self._forming, []

    def reduce(self, stage: int) -> None:
        """Do nothing: each part is reduced when it is released."""

    def wait_reductions(self) -> None:
        """Wait until all released gradients are added to the shards."""
        self._finish()

    def _finish(self) -> None:
        """Wait for the reductions in flight and add their results to the shards."""
        while self._under_way:
            message = self._under_way.pop(0)
            self._shards[message.key].add_(message.wait()[message.layout.own])

    def _under_way_bytes(self) -> int:
        return sum(message.size_bytes for message in self._under_way)
