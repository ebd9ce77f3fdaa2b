"""Weight providers, which stages ask for their weights part by part, just before they compute.

A part is computed with at once: one layer, the parameters before the layers, or those behind them.
Weights may be on the rank all the time, be gathered from the ranks over which they are sharded, or
come from the rank that owns a stage. So the provider knows from the start of a step in which order
parts are wanted, and a stage says when it is done with each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from sppo.engine.streamed_gradients import StreamedGradients
from sppo.engine.streamed_weights import StreamedWeights

T = TypeVar("T")

WeightPart = int | Literal["embedding", "head"]
"""A layer by its index in the model; the embedding (and learned positions); the final norm and the
projection to the vocabulary."""


class WeightProvider(Protocol):
    """Gives a rank's stages their weights, in the compute dtype.

    In a step :meth:`begin` comes first, then :meth:`take` and :meth:`release` of every visit in
    the order announced, one visit at a time. Weights may not be touched after their release.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Type of all weights."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of all weights."""
        ...

    def begin(self, visits: Iterable[WeightPart]) -> None:
        """Get ready for a step.

        Args:
            visits: what will be taken, in order, the same part several times. An iterator may be
                read as far ahead as the provider fetches.
        """
        ...

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return weights of ``part``: of a layer by the names within it, else by global name."""
        ...

    def release(self, part: WeightPart) -> None:
        """Give back what :meth:`take` returned."""
        ...

    def assert_idle(self) -> None:
        """Check that nothing is left after a step: all announced parts were taken and released."""
        ...

    def abort(self) -> None:
        """Drop everything that is held or under way: the step failed."""
        ...

    def take_peak_bytes(self) -> int:
        """Return the most temporary bytes held for the stages since the last call."""
        ...


@contextmanager
def visit(weights: WeightProvider, part: WeightPart) -> Iterator[Mapping[str, Tensor]]:
    """Take the weights of ``part`` for as long as the context lasts."""
    try:
        yield weights.take(part)
    finally:
        weights.release(part)


class ResidentWeights:
    """A :class:`WeightProvider` of weights that are on the device whenever their stage runs.

    Args:
        weights: all parameters of the rank's stages by global name.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.dtype, self.device = format_of(weights)
        self._weights, self._names = weights, names_by_part(weights)

    def begin(self, visits: Iterable[WeightPart]) -> None:
        """Do nothing: all weights are here."""

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return the weights of ``part``."""
        return {local: self._weights[name] for local, name in self._names[part].items()}

    def release(self, part: WeightPart) -> None:
        """Do nothing: weights stay."""

    def assert_idle(self) -> None:
        """Do nothing: nothing can be left."""

    def abort(self) -> None:
        """Do nothing: nothing is under way."""

    def take_peak_bytes(self) -> int:
        """Return the most bytes of weights that are not here all the time; 0 if all are."""
        return streamed_peak_bytes(self._weights)


def format_of(tensors: Mapping[str, Tensor]) -> tuple[torch.dtype, torch.device]:
    """Return the type of some tensors, and the device on which they are used."""
    if isinstance(tensors, StreamedWeights | StreamedGradients):
        return tensors.dtype, tensors.device
    first = next(iter(tensors.values()))
    return first.dtype, first.device


def streamed_peak_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the most bytes on the device, since the last call, of what comes and goes by stage."""
    if isinstance(tensors, StreamedWeights | StreamedGradients):
        return tensors.take_peak_bytes()
    return 0


def names_by_part(names: Iterable[str]) -> dict[WeightPart, dict[str, str]]:
    """Global names of the parameters of each part, by the names that :meth:`take` gives them.

    Args:
        names: global names of all parameters of a rank's stages. Where the head is among them, but
            no projection of its own, it projects with the embedding.
    """
    parts: dict[WeightPart, dict[str, str]] = {}
    for name in names:
        owner, rest = name.split(".", 1)
        if owner == "layers":
            index, local = rest.split(".", 1)
            parts.setdefault(int(index), {})[local] = name
        elif owner in ("embed", "positions"):
            parts.setdefault("embedding", {})[name] = name
        else:
            parts.setdefault("head", {})[name] = name
    if "head" in parts and "head.weight" not in parts["head"]:
        parts["head"]["embed.weight"] = "embed.weight"
    return parts


def messages_of(
    part: WeightPart, names: Iterable[str], by_name: Mapping[str, T]
) -> list[tuple[T, list[str]]]:
    """Return who carries which parameters of ``part`` at once: all of a layer, others one by one.

    Args:
        part: which one it is.
        names: global names of its parameters.
        by_name: who carries each; parameters without a carrier are left out.
    """
    carried = [name for name in names if name in by_name]
    if not isinstance(part, int):
        return [(by_name[name], [name]) for name in carried]
    messages: dict[T, list[str]] = {}
    for name in carried:
        messages.setdefault(by_name[name], []).append(name)
    return list(messages.items())


def room_for_parts(part_bytes: Mapping[WeightPart, int]) -> int:
    """Bytes of two layers, one in use and one on its way, or of the largest part outside of them.

    Args:
        part_bytes: of each part.
    """
    return max((1 + isinstance(part, int)) * size for part, size in part_bytes.items())
