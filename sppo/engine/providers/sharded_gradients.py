"""Gradient sums whose flat rows are sharded over ranks; a part is whole until it is reduced.

ZeRO-2 (Rajbhandari et al., 2020). While one layer's gradients are computed, those of the previous
layer are being reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sppo.engine.providers.gradients import GradientProvider
from sppo.engine.providers.part_rows import PartRows, WeightPart
from sppo.parallel.row_messages import RowMessage


class ShardedGradients(GradientProvider):
    """Provider of gradient sums that are sharded over ranks.

    Each part is reduced when it is released, and added to this rank's shard of the sums.

    Args:
        shards: This rank's shards of the sums.
        note: Function that is given the key and the whole of each row before it is reduced.
    """

    def __init__(
        self, shards: PartRows, *, note: Callable[[str, Tensor], None] | None = None
    ) -> None:
        super().__init__(shards)
        self._note = note
        self._taken: dict[str, Tensor] = {}
        self._taken_part: WeightPart | None = None
        self._forming: list[RowMessage] = []
        self._under_way: list[RowMessage] = []

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return tensors to add the gradients of ``part`` to: zeros, or unsharded sums."""
        assert self._taken_part is None, f"{part} is taken before {self._taken_part} is released"
        shards = self._sums
        if self._under_way_bytes() + shards.part_bytes[part] > shards.room_bytes:
            self.wait_reductions()
        self._taken_part, self._forming = part, shards.messages(part, torch.zeros)
        self._taken = shards.views(part, self._forming)
        shards.count_whole(self._under_way_bytes() + shards.part_bytes[part])
        return self._taken

    def release(self, part: WeightPart) -> None:
        """Start to reduce the gradients of ``part``, after earlier reductions are finished."""
        assert part == self._taken_part, f"{part} is released, {self._taken_part} was taken"
        self.wait_reductions()
        self._taken.clear()  # the stage holds the same dict: frees the tensors in any case
        self._taken_part = None
        for message in self._forming:
            if self._note is not None:
                self._note(message.key, message.whole)
            message.reduce()
        self._under_way, self._forming = self._forming, []

    def wait_reductions(self) -> None:
        """Wait for the reductions in flight and add their results to the shards."""
        while self._under_way:
            message = self._under_way.pop(0)
            self._sums.rows[message.key].add_(message.wait()[message.layout.own])

    def _under_way_bytes(self) -> int:
        return sum(message.whole.nbytes for message in self._under_way)
