"""Gradient sums whose rows are sharded over ranks; a part is whole only until it is reduced.

ZeRO-2 (Rajbhandari et al., 2020). While one layer's gradients are computed, those of the previous
layer are being reduced.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.engine.providers.sharded_parts import ShardedParts
from sppo.engine.providers.weights import WeightPart
from sppo.parallel.row_layout import Shapes
from sppo.parallel.shard_messages import GradientMessage


class ShardedGradients(ShardedParts):
    """Provider of gradient sums that are sharded over ranks.

    Implements :class:`sppo.engine.providers.gradients.GradientProvider`. Gradients are added to
    this rank's rows of the sums.
    """

    def __init__(
        self,
        rows: Mapping[str, Tensor],
        *,
        shapes: Shapes,
        groups: Mapping[str, ProcessGroup],
    ) -> None:
        super().__init__(rows, shapes=shapes, groups=groups)
        self._taken: dict[str, Tensor] = {}
        self._taken_part: WeightPart | None = None
        self._forming: list[GradientMessage] = []
        self._under_way: list[GradientMessage] = []

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return tensors to add the gradients of ``part`` to: zeros, or unsharded sums."""
        assert self._taken_part is None, f"{part} is taken before {self._taken_part} is released"
        if _size_bytes(self._under_way) + self._part_bytes[part] > self.room_bytes:
            self._finish()
        self._taken_part = part
        self._forming = [
            GradientMessage(group, shapes, dtype=self.dtype, device=self.device)
            for group, shapes in self._messages(part)
        ]
        whole: dict[str, Tensor] = {}
        for forming in self._forming:
            whole |= forming.whole
        self._taken = self._by_local_name(part, whole)
        self._count(_size_bytes(self._under_way) + _size_bytes(self._forming))
        return self._taken

    def release(self, part: WeightPart) -> None:
        """Start to reduce the gradients of ``part``, after earlier reductions are finished."""
        assert part == self._taken_part, f"{part} is released, {self._taken_part} was taken"
        self._finish()
        self._taken.clear()  # the stage holds the same dict: frees the tensors in any case
        self._taken_part = None
        self._count(sum(m.size_bytes * (1 + m.is_copied) for m in self._forming))
        for message in self._forming:
            message.reduce()
        self._under_way, self._forming = self._forming, []

    def reduce(self, stage: int) -> None:
        """Do nothing: each part is reduced when it is released."""

    def wait_reductions(self) -> None:
        """Wait until all released gradients are added to the rows."""
        self._finish()

    def _finish(self) -> None:
        """Wait for the reductions in flight and add their results to the rows."""
        while self._under_way:
            self._under_way.pop(0).add_to(self._rows)


def _size_bytes(messages: list[GradientMessage]) -> int:
    return sum(message.size_bytes for message in messages)
