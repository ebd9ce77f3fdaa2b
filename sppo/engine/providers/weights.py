"""Weight providers, from which stages take their weights part by part, just before they compute.

A part is one layer, the parameters before the layers, or the parameters after the layers. Weights
may be on the rank all the time, be gathered from the ranks over which they are sharded, or come
from the rank that owns a stage. The provider is therefore given the order of the parts at the start
of a step, and a stage releases each part after use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
from torch import Tensor

from sppo.engine.providers.row_views import RowViews
from sppo.engine.providers.streamed_tensors import StreamedTensors

WeightPart = int | Literal["embedding", "head"]
"""Weights taken together: an int is the layer of that index in the model, "embedding" the embedding
and learned positions, "head" the final norm and the projection to the vocabulary."""


class PartProvider(Protocol):
    """Provider of the weights of one part after another."""

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return the weights of ``part``, by name within the layer, or else by global name."""
        ...

    def release(self, part: WeightPart) -> None:
        """Release the weights of ``part`` that :meth:`take` returned."""
        ...


class WeightProvider(PartProvider, Protocol):
    """Provider of the weights of a rank's stages, in the compute dtype.

    A step calls :meth:`begin` first, then :meth:`take` and :meth:`release` for every visit in the
    announced order, one visit at a time. Weights must not be used after their release.
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
        """Prepare for a step, before which all parts of an earlier step were taken and released.

        Args:
            visits: Parts that the step will take, in order; a part may occur several times. An
                iterator is read only as far ahead as the provider fetches.
        """
        ...

    def take_peak_bytes(self) -> int:
        """Return the peak bytes of temporary weights on the device since the last call."""
        ...


@contextmanager
def visit(weights: PartProvider, part: WeightPart) -> Iterator[Mapping[str, Tensor]]:
    """Take the weights of ``part`` for the duration of the context."""
    try:
        yield weights.take(part)
    finally:
        weights.release(part)


class ResidentWeights:
    """A :class:`WeightProvider` of weights that are on the device whenever their stage runs.

    Args:
        weights: All parameters of the rank's stages by global name.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.dtype, self.device = format_of(weights)
        self._weights, self._names = weights, names_by_part(weights)

    def begin(self, visits: Iterable[WeightPart]) -> None:
        """Do nothing: all weights are on the device when their stage runs."""

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return the weights of ``part``."""
        return {local: self._weights[name] for local, name in self._names[part].items()}

    def release(self, part: WeightPart) -> None:
        """Do nothing: releasing a part frees no weights."""

    def take_peak_bytes(self) -> int:
        """Return the peak bytes of streamed weights since the last call; 0 if none are streamed."""
        return streamed_peak_bytes(self._weights)


def format_of(tensors: Mapping[str, Tensor]) -> tuple[torch.dtype, torch.device]:
    """Return the dtype of ``tensors`` and the device on which compute uses them."""
    stored = _stored(tensors)
    if isinstance(stored, StreamedTensors):
        return stored.dtype, stored.device
    first = next(iter(stored.values()))
    return first.dtype, first.device


def streamed_peak_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the peak bytes of streamed ``tensors`` on the device since the last call, else 0."""
    stored = _stored(tensors)
    return stored.take_peak_bytes() if isinstance(stored, StreamedTensors) else 0


def _stored(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the rows that ``tensors`` are views of, or ``tensors`` themselves."""
    return tensors.rows if isinstance(tensors, RowViews) else tensors


def names_by_part(names: Iterable[str]) -> dict[WeightPart, dict[str, str]]:
    """Return the global names of each part's parameters, by the names that ``take`` uses.

    Args:
        names: Global names of all parameters of a rank's stages. If there is a final norm without a
            projection ("head.weight"), the embedding is also part of the head.
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
