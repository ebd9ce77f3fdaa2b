"""Weights whose flat rows are sharded over ranks and that are gathered part by part for use.

ZeRO-3 (Rajbhandari et al., 2020). While one layer computes, the layer that is used next is being
gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from sppo.engine.providers.part_rows import PartRows, WeightPart
from sppo.engine.providers.weights import WeightProvider
from sppo.parallel.row_messages import RowMessage


class GatheredWeights(WeightProvider):
    """Provider of weights that are sharded over ranks.

    Shards are read at every gather, so that the next step sees an update in place.
    """

    def __init__(self, shards: PartRows) -> None:
        super().__init__(shards)
        self._visits: Iterator[WeightPart] = iter(())
        self._next: WeightPart | None = None
        self._ahead: list[RowMessage] | None = None
        self._held: dict[str, Tensor] = {}
        self._held_part: WeightPart | None = None

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
            self._fetch_ahead()  # if its shards were not on the device before
            self._held_part, self._held = part, self._arrived(part)
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

    def _fetch_ahead(self) -> None:
        """Start to gather the next part, if shards are on the device and the memory suffices."""
        part, shards = self._next, self._weights
        if part is None or part == self._held_part or self._ahead is not None:
            return
        whole = shards.part_bytes[part]
        if self._held_part is not None:
            whole += shards.part_bytes[self._held_part]
        if whole > shards.room_bytes or not shards.are_here(part):
            return
        self._ahead = shards.messages(part, torch.empty)
        for message in self._ahead:
            message.gather(shards.rows[message.key])
        shards.count_whole(whole)

    def _arrived(self, part: WeightPart) -> dict[str, Tensor]:
        """Wait for the next part; return its whole weights by the names that ``take`` uses."""
        messages, self._ahead = self._ahead, None
        assert messages is not None, "room was made for what is wanted next"
        for message in messages:
            message.wait()
        return self._weights.views(part, messages)
