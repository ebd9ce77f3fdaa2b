"""Section ``adapter`` of a run file: low-rank adapters (LoRA) beside frozen weights."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from sppo.config.base import MOST_LAYERS, MOST_WIDTH, Directory, Section, comma_list

Target = Literal["q", "k", "v", "o", "gate", "up", "down"]
TARGETS: tuple[Target, ...] = ("q", "k", "v", "o", "gate", "up", "down")
"""Projections of a layer, in the order in which it computes them."""
WholeKind = Literal["norms", "embed", "head"]
_ALL = "all-linear"
_LAYERS = re.compile(r"\s*([0-9]{1,4})(?:\s*-\s*([0-9]{1,4}))?\s*", re.ASCII)


def _layer_numbers(value: object) -> tuple[int, ...] | None:
    """Return text such as ``0-3,8``, or a list, as the ascending numbers of layers."""
    if value is None:
        return None
    found: set[int] = set()
    for part in comma_list(value) or [""]:
        match = _LAYERS.fullmatch(str(part))
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not numbers or numbers[-1] >= MOST_LAYERS:
            raise ValueError(
                f"write numbers of layers from 0 to {MOST_LAYERS - 1}, such as 16-31 or 0,4,8-11"
            )
        found.update(numbers)
    return tuple(sorted(found))


def _short_names(value: object) -> object:
    """Return names such as ``q_proj`` of Hugging Face as those of SPPO, each once, in order.

    PEFT's word for all projections is ``all-linear``.
    """
    if value in (None, _ALL):
        return None
    names = [
        name.removesuffix("_proj") if isinstance(name, str) else name for name in comma_list(value)
    ]
    known = [target for target in TARGETS if target in names]
    return known + [name for name in names if name not in known]


LayerNumbers = Annotated[
    tuple[int, ...] | None,
    BeforeValidator(_layer_numbers),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^[0-9, -]+$"},
                {"type": "integer", "minimum": 0},
                {"type": "array", "items": {"type": "integer", "minimum": 0}},
            ]
        }
    ),
]
"""Numbers of layers from 0 on: ``16-31``, ``0,4,8-11``, or a list of numbers; null for all."""


class AdapterConfig(Section):
    """Low-rank adapters: each target W gets trained factors, y = x W' + s (x A') B'.

    All other parameters are frozen, but for those of ``also_train``.
    """

    rank: Annotated[int, Field(ge=1, le=MOST_WIDTH)]
    """Rows of A and columns of B."""
    alpha: float | None = Field(default=None, gt=0)
    """Numerator of the scale s of the adapters; null means ``rank``, so that s is 1."""
    scaling: Literal["standard", "rank_stabilized"] = "standard"
    """Scale of the adapters. standard: alpha / rank; rank_stabilized: alpha / sqrt(rank)."""
    targets: Annotated[
        Annotated[tuple[Target, ...], Field(min_length=1)] | None, BeforeValidator(_short_names)
    ] = None
    """Projections that get adapters, by SPPO's names or by those of Hugging Face such as
    ``q_proj``; null, or all-linear, means all projections of a layer. In layers with experts, gate,
    up and down are those of the shared MLP; experts have no adapters."""
    layers: LayerNumbers = None
    """Layers that get adapters, such as 16-31; null means all."""
    also_train: Annotated[tuple[WholeKind, ...], BeforeValidator(comma_list)] = ()
    """Parameters that train whole beside the adapters (``modules_to_save`` of PEFT). norms: all
    norms; embed: the token embedding; head: the vocabulary projection, which is the embedding if
    the model ties both. norms and embed help when the context is extended."""
    from_peft: Directory | None = None
    """Directory of an adapter that PEFT or ``sppo convert to-peft`` has written, whose factors are
    the initial ones; null starts with random A and with B = 0, so that the first step has the loss
    of the frozen model."""

    @property
    def scale(self) -> float:
        """Factor s of the adapters."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (self.rank if self.scaling == "standard" else math.sqrt(self.rank))
