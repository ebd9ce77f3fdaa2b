"""Gradient providers, from which stages take the fp32 gradient sums of one part of the model.

Weight parts are defined by :mod:`sppo.engine.providers.weights`. The sums may be on the rank all
the time and be reduced over ranks once per step, or be computed part by part and be reduced after
each use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from sppo.engine.providers.weights import WeightPart, names_by_part, streamed_peak_bytes


class GradientProvider(Protocol):
    """Provider of the fp32 (fp64 for fp64) sums to which a rank's stages add gradients.

    One part is taken at a time, and released before the next is taken. A step calls :meth:`reduce`
    once per stage, and :meth:`wait_reductions` after the last stage: sums are not complete before.
    """

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return the tensors to add gradients of ``part`` to, named like the part's weights."""
        ...

    def release(self, part: WeightPart) -> None:
        """Take back the tensors that :meth:`take` returned; the caller must not add to them."""
        ...

    def reduce(self, stage: int) -> None:
        """Start any reduction not yet started for a stage whose gradients are complete here."""
        ...

    def wait_reductions(self) -> None:
        """Wait until all released gradients are in the sums, and started reductions are done."""
        ...

    def take_peak_bytes(self) -> int:
        """Return the peak bytes of temporary gradients on the device since the last call."""
        ...


@contextmanager
def gradients_of(gradients: GradientProvider, part: WeightPart) -> Iterator[Mapping[str, Tensor]]:
    """Take the gradients of ``part``; release them unless the context ends with an error."""
    yield gradients.take(part)
    gradients.release(part)


class ResidentGradients:
    """A :class:`GradientProvider` of sums that are whole on the device whenever their stage runs.

    Args:
        sums: Sums of all parameters of the rank's stages by global name.
        reduce: Function that starts the all-reduce of a stage's gradients over the ranks that hold
            the same stage; None if there is only one.
        wait_reductions: Function that waits for all started reductions; None if there are none.
    """

    def __init__(
        self,
        sums: Mapping[str, Tensor],
        *,
        reduce: Callable[[int], None] | None = None,
        wait_reductions: Callable[[], None] | None = None,
    ) -> None:
        self._reduce, self._wait_reductions = reduce, wait_reductions
        self._sums, self._names = sums, names_by_part(sums)

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return the sums of ``part``."""
        return {local: self._sums[name] for local, name in self._names[part].items()}

    def release(self, part: WeightPart) -> None:
        """Do nothing: the sums need no release."""

    def reduce(self, stage: int) -> None:
        """Start to reduce the gradients of a stage over the ranks that hold the stage."""
        if self._reduce is not None:
            self._reduce(stage)

    def wait_reductions(self) -> None:
        """Wait for all started reductions."""
        if self._wait_reductions is not None:
            self._wait_reductions()

    def take_peak_bytes(self) -> int:
        """Return the peak bytes of streamed sums since the last call; 0 if none are streamed."""
        return streamed_peak_bytes(self._sums)
