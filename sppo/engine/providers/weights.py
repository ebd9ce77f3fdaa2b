"""Weight providers, from which stages take their weights part by part, just before they compute.

Weights may be on the rank all the time, be gathered from the ranks over which they are sharded, or
come from the rank that owns a stage. The provider is therefore given the order of the parts at the
start of a step, and a stage releases each part after use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from sppo.engine.providers.part_rows import PartRows, WeightPart
from sppo.engine.providers.streamed_rows import StreamedWeights


class PartProvider(Protocol):
    """Provider of the weights of one part after another."""

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return the weights of ``part``, by name within the layer, or else by global name."""
        ...

    def release(self, part: WeightPart) -> None:
        """Release the weights of ``part`` that :meth:`take` returned."""
        ...


class WeightProvider:
    """Provider of the weights of a rank's stages, in the compute dtype.

    A step calls :meth:`begin` first, then :meth:`take` and :meth:`release` for every visit in the
    announced order, one visit at a time. Weights must not be used after their release.

    Args:
        weights: All parameters of the rank's stages, which are on the device whenever their stage
            runs.
    """

    def __init__(self, weights: PartRows) -> None:
        self.dtype, self.device, self._weights = weights.dtype, weights.device, weights
        rows = weights.rows
        self.streamed = rows if isinstance(rows, StreamedWeights) else None
        """Weights in another tier, which the program fetches; None if they stay on the device."""

    def begin(self, visits: Iterable[WeightPart]) -> None:
        """Prepare for a step, before which all parts of an earlier step were taken and released.

        Args:
            visits: Parts that the step will take, in order; a part may occur several times. An
                iterator is read only as far ahead as the provider fetches.
        """

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return the weights of ``part``, by name within the layer, or else by global name."""
        return self._weights.views(part)

    def release(self, part: WeightPart) -> None:
        """Release the weights of ``part`` that :meth:`take` returned."""

    def rows_of(self, layer: int) -> list[Tensor]:
        """Return the flat rows of a layer whose weights are whole on this rank."""
        return self._weights.rows_of(layer)

    def take_peak_bytes(self) -> int:
        """Return the peak bytes of temporary weights on the device since the last call."""
        return self._weights.take_peak_bytes()


@contextmanager
def visit(weights: PartProvider, part: WeightPart) -> Iterator[Mapping[str, Tensor]]:
    """Take the weights of ``part`` for the duration of the context."""
    try:
        yield weights.take(part)
    finally:
        weights.release(part)
