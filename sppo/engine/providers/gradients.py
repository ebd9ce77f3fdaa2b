"""Gradient providers, from which stages take the fp32 gradient sums of one part of the model.

The sums may be on the rank all the time and be reduced over ranks once per step, or be computed
part by part and be reduced after each use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from sppo.engine.providers.part_rows import PartRows, WeightPart
from sppo.engine.providers.streamed_rows import StreamedGradients


class GradientProvider:
    """Provider of the fp32 (fp64 for fp64) sums to which a rank's stages add gradients.

    One part is taken at a time, and released before the next is taken. A step calls :meth:`reduce`
    once per stage, and :meth:`wait_reductions` after the last stage: sums are not complete before.

    Args:
        sums: Sums of all parameters of the rank's stages, which are on the device whenever their
            stage runs.
        reduce: Function that starts the reduction of a stage's gradients over the ranks that hold
            the same stage.
        wait_reductions: Function that waits for all started reductions.
    """

    def __init__(
        self,
        sums: PartRows,
        *,
        reduce: Callable[[int], None] = lambda stage: None,
        wait_reductions: Callable[[], None] = lambda: None,
    ) -> None:
        self._reduce, self._wait_reductions = reduce, wait_reductions
        self._sums = sums
        self.streamed = sums.rows if isinstance(sums.rows, StreamedGradients) else None
        """Sums in another tier, to which the program moves them; None if they stay here."""

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return the tensors to add gradients of ``part`` to, named like the part's weights."""
        return self._sums.views(part)

    def release(self, part: WeightPart) -> None:
        """Take back the tensors that :meth:`take` returned; the caller must not add to them."""

    def reduce(self, stage: int) -> None:
        """Start any reduction not yet started for a stage whose gradients are complete here."""
        self._reduce(stage)

    def wait_reductions(self) -> None:
        """Wait until all released gradients are in the sums, and started reductions are done."""
        self._wait_reductions()

    def take_peak_bytes(self) -> int:
        """Return the peak bytes of temporary gradients on the device since the last call."""
        return self._sums.take_peak_bytes()


@contextmanager
def gradients_of(gradients: GradientProvider, part: WeightPart) -> Iterator[Mapping[str, Tensor]]:
    """Take the gradients of ``part``; release them unless the context ends with an error."""
    yield gradients.take(part)
    gradients.release(part)
