"""Figures of the last steps, and what stands out against them.

A figure stands out if its distance from the median is more than twice that of any of the last
steps, both as ratios. After n steps whose logarithms have tails no heavier than an exponential
distribution, the next does so with probability about 4 / n^2, whatever the scale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

WINDOW = 256
"""Number of steps that a figure is compared with."""
_LEAST = 32
"""Least number of steps that a figure is compared with: fewer would make too many stand out."""
EFFECT = 1e-3
"""Relative change of the norm of all gradients by one wrong element that has to be found."""
ELEMENT_SHARE = (1 - (1 + EFFECT) ** -2) ** 0.5
"""Least share of the norm, 4.5 %, that a wrong element has which makes the norm larger by EFFECT:
all other elements have at most the norm without it, and squares add up."""


def stands_out(value: float, usual: Sequence[float]) -> bool:
    """Return whether a figure, none of which is negative, stands out against ``usual``."""
    middle = median(usual)
    return value * middle > max(usual) ** 2 or value * middle < min(usual) ** 2


def is_alone(share: float, next_share: float) -> bool:
    """Return whether an element with a large share differs from the next of its tensor.

    One wrong element does; where the data makes large elements, there are several.
    """
    return next_share <= ELEMENT_SHARE or share > 2 * next_share


class UsualFigure:
    """Values of one figure in the last steps."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)

    def add(self, value: float) -> None:
        """Add the value of a step that was taken."""
        self._last.append(value)

    def is_left_by(self, value: float) -> bool:
        """Return whether a value stands out; False while there are too few to compare with."""
        return len(self._last) >= _LEAST and stands_out(value, self._last)


class ElementShares:
    """Shares that single elements of tensors had in the norm of all gradients in the last steps.

    In most tensors no element ever has as much as :data:`ELEMENT_SHARE`: one that has stands out,
    without any history. In few tensors some element often has more: one with more than twice as
    much as any of the last steps stands out.
    """

    def __init__(self) -> None:
        self._last: deque[Mapping[str, float]] = deque(maxlen=WINDOW)

    def add(self, shares: Mapping[str, float]) -> None:
        """Add the largest share of each tensor, by name, in a step that was taken."""
        self._last.append({name: x for name, x in shares.items() if x > ELEMENT_SHARE})

    def standing_out(self, shares: Mapping[str, float]) -> list[str]:
        """Return the names of the tensors whose largest share stands out."""
        large = {name: share for name, share in shares.items() if share > ELEMENT_SHARE}
        return [
            name
            for name, share in large.items()
            if share > 2 * max((step.get(name, 0.0) for step in self._last), default=0.0)
        ]
