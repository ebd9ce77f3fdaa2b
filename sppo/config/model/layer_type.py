"""Types of layers: the properties in which the layers of one model differ."""

from __future__ import annotations

from typing import NamedTuple


class LayerType(NamedTuple):
    """Properties of a layer, beside those that all layers of its model share."""

    window: int | None
    """Number of keys that a query attends to: the last ones up to the query itself; None for all
    keys."""
    rope_theta: float | None
    """Base of the rotary wavelengths; None if q and k are not rotated."""
    rope_scaled: bool
    """Whether the model's ``rope_scaling`` stretches the rotation."""
    routed: bool
    """Whether the MLP is a mixture of experts."""
