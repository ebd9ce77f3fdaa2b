"""Types of layers: the properties in which the layers of one model differ."""

from __future__ import annotations

from typing import NamedTuple


class Rotation(NamedTuple):
    """Rotation of q and k by their positions."""

    theta: float
    """Base of the rotary wavelengths."""
    is_scaled: bool
    """True if the model's ``rope_scaling`` stretches the wavelengths."""


class LayerType(NamedTuple):
    """Properties of a layer, beside those that all layers of its model share."""

    window: int | None
    """Number of keys that a query attends to: the last ones up to the query itself; None for all
    keys, and in layers with linear attention."""
    rotation: Rotation | None
    """Rotation of q and k; None if they are not rotated."""
    linear: bool
    """True if the layer has linear attention, with a state in place of keys and values."""
    routed: bool
    """True if the MLP is a mixture of experts."""
