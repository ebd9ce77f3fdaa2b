"""Weights whose rows are sharded over ranks and that are gathered part by part for use.

ZeRO-3 (Rajbhandari et al., 2020). While one layer computes, the layer that is used next is being
gathered. At most two layers' whole weights, or the largest part outside the layers, are allocated.
Every rank of the group runs the same program, so all ranks gather the same parts in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from sppo.engine.providers.streamed_weights import StreamedWeights
from sppo.engine.providers.weights import (
    WeightPart,
    format_of,
    messages_of,
    names_by_part,
    room_for_parts,
    streamed_peak_bytes,
)
from sppo.parallel.parameter_all_gather import AllGatherHandle, ParameterAllGather


class GatheredWeights:
    """Provider of weights that are sharded over ranks.

    Implements :class:`sppo.engine.providers.weights.WeightProvider`.

    Args:
        rows: This rank's rows of every parameter of its stages by global name, in the compute
            dtype; read at every gather, so that the next step sees an update in place.
        shapes: Shapes of the whole parameters by global name.
        gathers: All-gather of each sharded parameter, by global name; parameters without one are
            whole on this rank.
    """

    def __init__(
        self,
        rows: Mapping[str, Tensor],
        *,
        shapes: Mapping[str, tuple[int, ...]],
        gathers: Mapping[str, ParameterAllGather],
    ) -> None:
        self.dtype, self.device = format_of(rows)
        self._rows, self._shapes, self._gathers = rows, shapes, gathers
        self._parts = names_by_part(rows)
        self._part_bytes = {part: self._padded_bytes(part) for part in self._parts}
        self.room_bytes = room_for_parts(self._part_bytes)
        self._visits: Iterator[WeightPart] = iter(())
        self._next: WeightPart | None = None
        self._ahead: list[AllGatherHandle] | None = None
        self._held: dict[str, Tensor] = {}
        self._held_part: WeightPart | None = None
        self._peak_bytes = 0

    def begin(self, visits: Iterable[WeightPart]) -> None:
        """Start to gather the first of ``visits``."""
        left = {"held": self._held_part, "announced": self._next}
        assert all(part is None for part in left.values()), f"weights left over: {left}"
        self._visits = iter(visits)
        self._next = next(self._visits, None)
        self._fetch_ahead()

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return the gathered weights of ``part``, and start to gather the next part."""
        assert part == self._next, f"{part} is taken where {self._next} was announced"
        if self._held_part is None:
            self._fetch_ahead()  # if its rows were not on the device before
            self._held_part, self._held = part, self._arrived()
        assert self._held_part == part, f"{part} is taken before {self._held_part} is released"
        self._next = next(self._visits, None)
        self._fetch_ahead()
        return self._held

    def release(self, part: WeightPart) -> None:
        """Free the weights of ``part``, unless the next visit takes the same part."""
        if part != self._held_part or part == self._next:
            return  # the take failed, or the next visit is the same part
        self._held.clear()  # the stage holds the same dict: frees the tensors in any case
        self._held_part = None
        self._fetch_ahead()

    def take_peak_bytes(self) -> int:
        """Return the peak bytes of gathered weights plus streamed rows since the last call."""
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak + streamed_peak_bytes(self._rows)

    def _fetch_ahead(self) -> None:
        """Start to gather the next part, if its rows are on the device and the memory suffices."""
        part = self._next
        if part is None or part == self._held_part or self._ahead is not None:
            return
        if isinstance(self._rows, StreamedWeights) and not self._rows.has(
            self._parts[part].values()
        ):
            return
        held = 0 if self._held_part is None else self._part_bytes[self._held_part]
        if held + self._part_bytes[part] > self.room_bytes:
            return
        self._ahead = [
            gather.begin({name: self._rows[name] for name in names}, self._shapes)
            for gather, names in self._messages(part)
        ]
        self._count(held + self._part_bytes[part])

    def _arrived(self) -> dict[str, Tensor]:
        """Wait for the next part; return its whole weights by the names that ``take`` uses."""
        assert self._ahead is not None, "room was made for what is wanted next"
        part, gatherings = self._next, self._ahead
        assert part is not None, "checked by take"
        self._ahead = None
        self._count(sum(g.size_bytes * (1 + g.is_copied) for g in gatherings))
        whole: dict[str, Tensor] = {}
        while gatherings:
            whole |= gatherings.pop(0).finish()
        return {
            local: whole[name] if name in whole else self._rows[name]
            for local, name in self._parts[part].items()
        }

    def _messages(self, part: WeightPart) -> list[tuple[ParameterAllGather, list[str]]]:
        """Return the all-gathers of a part with the global names that each carries."""
        return messages_of(part, self._parts[part].values(), self._gathers)

    def _padded_bytes(self, part: WeightPart) -> int:
        elements = 0
        for gather, names in self._messages(part):
            elements += gather.padded_elements({name: self._shapes[name] for name in names})
        return elements * self.dtype.itemsize

    def _count(self, held_bytes: int) -> None:
        self._peak_bytes = max(self._peak_bytes, held_bytes)
