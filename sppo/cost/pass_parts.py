"""Seconds of the passes over a layer, divided into products, attention and other parts."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from sppo.cost.correction import UNCORRECTED, CostCorrection
from sppo.schedule.costs import Table


@dataclass(frozen=True, slots=True, eq=False)
class PassParts:
    """Seconds of one pass over one layer (or the head) for each subsequence, [subsequences].

    Attributes:
        products: Matrix products.
        attention: Attention kernels.
        elementwise: Norms, rotation, activation functions, residuals, casts and copies.
        gradient_sums: Reading and writing fp32 sums of weight gradients, unless `products` include
            this traffic.
        exchange: Communication inside a sequence-parallel group.
        launches: Fixed costs of kernels.
    """

    products: Table
    attention: Table
    elementwise: Table
    gradient_sums: Table
    exchange: Table
    launches: Table

    @property
    def seconds(self) -> Table:
        """Sum of all parts."""
        total: Table = sum(
            (getattr(self, name) for name in PART_NAMES), start=np.zeros_like(self.products)
        )
        return total

    def __add__(self, other: PassParts) -> PassParts:
        """Return the sum of two passes, part by part."""
        return PassParts(*(getattr(self, name) + getattr(other, name) for name in PART_NAMES))

    def times(self, factor: Table | float) -> PassParts:
        """Return the pass with every part multiplied by `factor`."""
        return PassParts(*(getattr(self, name) * factor for name in PART_NAMES))


PART_NAMES = tuple(field.name for field in fields(PassParts))


def pass_parts(tokens: Table, **parts: Table | float) -> PassParts:
    """Return a pass over subsequences of `tokens` with the given parts; all other parts are 0."""
    return PassParts(*(np.zeros_like(tokens) + parts.get(name, 0.0) for name in PART_NAMES))


@dataclass(frozen=True, slots=True, eq=False)
class LayerSeconds:
    """Seconds of each subsequence in one layer, or of each unit in all layers of each stage.

    Attributes:
        forward: Seconds of F.
        backward: Seconds of the input half of B, including attention, without recomputation.
        weight: Seconds of the weight half of B.
        linear_recompute: Seconds of recomputing the linear class.
        attention_recompute: Seconds of recomputing attention.
    """

    forward: Table
    backward: Table
    weight: Table
    linear_recompute: Table
    attention_recompute: Table

    def __add__(self, other: LayerSeconds) -> LayerSeconds:
        """Return the seconds of two layers, one after the other."""
        return LayerSeconds(*(getattr(self, name) + getattr(other, name) for name in PASS_NAMES))

    def times(self, layers: int) -> LayerSeconds:
        """Return the seconds of `layers` equal layers."""
        return LayerSeconds(*(getattr(self, name) * layers for name in PASS_NAMES))


PASS_NAMES = tuple(field.name for field in fields(LayerSeconds))


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """Passes of :class:`LayerSeconds`, each divided into its parts."""

    forward: PassParts
    backward: PassParts
    weight: PassParts
    linear_recompute: PassParts
    attention_recompute: PassParts

    def corrected(self, correction: CostCorrection) -> LayerParts:
        """Return the passes with `correction` applied."""
        if correction == UNCORRECTED:
            return self
        backward = {
            name: getattr(self, name).times(correction.backward)
            for name in PASS_NAMES
            if name != "forward"
        }
        return LayerParts(self.forward.times(correction.forward), **backward)

    @property
    def seconds(self) -> LayerSeconds:
        """Seconds of each pass, the sum of its parts."""
        return LayerSeconds(*(getattr(self, name).seconds for name in PASS_NAMES))
