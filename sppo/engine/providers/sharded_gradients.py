"""Gradient sums whose rows are sharded over ranks; a part is whole only until it is reduced.

ZeRO-2 (Rajbhandari et al., 2020). While one layer's gradients are computed, those of the previous
layer are being reduced. At most two layers' whole gradients, or the largest part outside the
layers, are allocated. Every rank of the group runs the same program, so all ranks reduce the same
parts in order.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sppo.engine.providers.weights import (
    WeightPart,
    format_of,
    messages_of,
    names_by_part,
    room_for_parts,
    streamed_peak_bytes,
)
from sppo.parallel.gradient_reduce_scatter import GradientMessage, GradientReduceScatter


class ShardedGradients:
    """Provider of gradient sums that are sharded over ranks.

    Implements :class:`sppo.engine.providers.gradients.GradientProvider`.

    Args:
        shards: This rank's rows of the fp32 sums of every parameter of its stages, by global name;
            gradients are added to them.
        shapes: Shapes of the whole parameters by global name.
        scatters: Reduce-scatter of each sharded parameter, by global name; parameters without one
            are whole on this rank.
    """

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        *,
        shapes: Mapping[str, tuple[int, ...]],
        scatters: Mapping[str, GradientReduceScatter],
    ) -> None:
        self._dtype, self._device = format_of(shards)
        self._shards, self._shapes, self._scatters = shards, shapes, scatters
        self._parts = names_by_part(shards)
        self._part_bytes = {part: self._padded_bytes(part) for part in self._parts}
        self.room_bytes = room_for_parts(self._part_bytes)
        self._taken: dict[str, Tensor] = {}
        self._taken_part: WeightPart | None = None
        self._forming: list[GradientMessage] = []
        self._under_way: list[GradientMessage] = []
        self._peak_bytes = 0

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return tensors to add the gradients of ``part`` to: zeros, or unsharded sums."""
        assert self._taken_part is None, f"{part} is taken before {self._taken_part} is released"
        if _size_bytes(self._under_way) + self._part_bytes[part] > self.room_bytes:
            self._finish()
        self._taken_part, names = part, self._parts[part]
        self._forming = [
            scatter.zeros(
                {name: self._shapes[name] for name in message},
                dtype=self._dtype,
                device=self._device,
            )
            for scatter, message in messages_of(part, names.values(), self._scatters)
        ]
        whole: dict[str, Tensor] = {}
        for forming in self._forming:
            whole |= forming.whole
        self._taken = {
            local: whole[name] if name in whole else self._shards[name]
            for local, name in names.items()
        }
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
        """Wait until all released gradients are added to the shards."""
        self._finish()

    def take_peak_bytes(self) -> int:
        """Return the peak bytes of whole gradients plus streamed shards since the last call."""
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak + streamed_peak_bytes(self._shards)

    def _finish(self) -> None:
        """Wait for the reductions in flight and add their results to the shards."""
        while self._under_way:
            self._under_way.pop(0).add_to(self._shards)

    def _padded_bytes(self, part: WeightPart) -> int:
        messages = messages_of(part, self._parts[part].values(), self._scatters)
        elements = sum(
            scatter.padded_elements({name: self._shapes[name] for name in names})
            for scatter, names in messages
        )
        return elements * self._dtype.itemsize

    def _count(self, held_bytes: int) -> None:
        self._peak_bytes = max(self._peak_bytes, held_bytes)


def _size_bytes(messages: list[GradientMessage]) -> int:
    return sum(message.size_bytes for message in messages)
