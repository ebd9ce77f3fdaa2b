"""Where stages get their weights from: a provider, asked part by part, just before they compute.

A part is what is computed with at once: one layer, what is in front of the layers, or what is
behind them. Weights may be here all the time, be gathered from the ranks that share them out, or
come from the rank that a stage belongs to. So the provider knows, from the start of a step, which
part is wanted after which, and a stage says when it is done with each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
from torch import Tensor

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
        """Of all weights."""
        ...

    @property
    def device(self) -> torch.device:
        """Of all weights."""
        ...

    def begin(self, visits: Iterable[WeightPart]) -> None:
        """Get ready for a step.

        Args:
            visits: what will be taken, in order, the same part several times. An iterator may be
                read as far ahead as the provider fetches.
        """
        ...

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Weights of ``part``: of a layer by the names within it, of others by global name."""
        ...

    def release(self, part: WeightPart) -> None:
        """The stage is done with what :meth:`take` gave."""
        ...

    def assert_idle(self) -> None:
        """Nothing may be left after a step: all that was announced was taken and released."""
        ...

    def abort(self) -> None:
        """Forget a step that failed, with all that is held and under way."""
        ...

    def take_peak_bytes(self) -> int:
        """Most bytes that were held for the stages since the last call, beyond what stays."""
        ...


@contextmanager
def visit(weights: WeightProvider, part: WeightPart) -> Iterator[Mapping[str, Tensor]]:
    """Weights of ``part`` as long as the context lasts."""
    try:
        yield weights.take(part)
    finally:
        weights.release(part)


class ResidentWeights:
    """A :class:`WeightProvider` of weights that are here all the time.

    Args:
        weights: all parameters of the rank's stages by global name.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        first = next(iter(weights.values()))
        self.dtype, self.device = first.dtype, first.device
        self._parts = {
            part: {local: weights[name] for local, name in names.items()}
            for part, names in names_by_part(weights).items()
        }

    def begin(self, visits: Iterable[WeightPart]) -> None:
        """See :class:`WeightProvider`."""

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """See :class:`WeightProvider`."""
        return self._parts[part]

    def release(self, part: WeightPart) -> None:
        """See :class:`WeightProvider`."""

    def assert_idle(self) -> None:
        """See :class:`WeightProvider`."""

    def abort(self) -> None:
        """See :class:`WeightProvider`."""

    def take_peak_bytes(self) -> int:
        """See :class:`WeightProvider`."""
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
