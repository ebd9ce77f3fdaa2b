"""Gradient providers, which stages ask for the fp32 sums of a part of the model's parameters.

Parts are those of :mod:`sppo.engine.weights`. The sums may be on the rank all the time and be
reduced over the ranks once per step, or be formed part by part and be reduced after each use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from sppo.engine.weights import WeightPart, names_by_part, streamed_peak_bytes


class GradientProvider(Protocol):
    """Gives a rank's stages the fp32 (float64) tensors to which they add gradients.

    One part is taken at a time, and released before the next is taken. In a step :meth:`reduce`
    comes once for each stage, and :meth:`settle` behind the last of them: before, sums are not
    complete.
    """

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return what to add gradients of ``part`` to, by the names its weights have."""
        ...

    def release(self, part: WeightPart) -> None:
        """Take back what :meth:`take` returned: nothing is added to it any more."""
        ...

    def reduce(self, stage: int) -> None:
        """Begin to reduce what is left of the gradients of a stage, complete on this rank."""
        ...

    def settle(self) -> None:
        """Return when all that was released is in the sums, reduced where that was asked for."""
        ...

    def assert_idle(self) -> None:
        """Check that nothing is left after a step: all parts were released and reduced."""
        ...

    def abort(self) -> None:
        """Drop everything that is held or under way: the step failed."""
        ...

    def take_peak_bytes(self) -> int:
        """Return the most temporary bytes held for the stages since the last call."""
        ...


@contextmanager
def gradients_of(gradients: GradientProvider, part: WeightPart) -> Iterator[Mapping[str, Tensor]]:
    """Take the gradients of ``part``; they are released unless the context ends with an error."""
    yield gradients.take(part)
    gradients.release(part)


class ResidentGradients:
    """A :class:`GradientProvider` of sums that are whole on the device whenever their stage runs.

    Args:
        sums: of all parameters of the rank's stages by global name.
        reduce: begins to add up the gradients of a stage over the ranks that hold the same stage;
            None where there are no others.
        settle: returns when they have been added up.
    """

    def __init__(
        self,
        sums: Mapping[str, Tensor],
        *,
        reduce: Callable[[int], None] | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        self._reduce, self._settle = reduce, settle
        self._sums, self._names = sums, names_by_part(sums)

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return the sums of ``part``."""
        return {local: self._sums[name] for local, name in self._names[part].items()}

    def release(self, part: WeightPart) -> None:
        """Do nothing: sums stay until the end of the step."""

    def reduce(self, stage: int) -> None:
        """Begin to add up the gradients of a stage over the ranks that hold it."""
        if self._reduce is not None:
            self._reduce(stage)

    def settle(self) -> None:
        """Return when the gradients of all stages that were reduced are added up."""
        if self._settle is not None:
            self._settle()

    def assert_idle(self) -> None:
        """Do nothing: nothing can be left."""

    def abort(self) -> None:
        """Do nothing: nothing is under way."""

    def take_peak_bytes(self) -> int:
        """Return the most bytes of sums that are not here all the time; 0 if all are."""
        return streamed_peak_bytes(self._sums)
