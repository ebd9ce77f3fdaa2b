"""Weights with the factors of adapters added: W + s B A."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sppo.cost.trainable import LORA_A, LORA_B, Adapter, is_factor


class LostChange(NamedTuple):
    """Part of the change of one weight that rounding loses."""

    name: str
    share: float
    """Norm of what rounding changes, divided by the norm of s B A."""


class MergedWeights(Mapping[str, Tensor]):
    """Weights of a model without factors: those of an adapter are added in fp32, when looked up.

    Args:
        weights: Weights of the model by global name, among them the factors.
        adapter: The adapter; None if there are no factors.
        rounded_to: Type to which the reader rounds the weights, which :attr:`lost` measures.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        adapter: Adapter | None,
        *,
        rounded_to: torch.dtype = torch.float32,
    ) -> None:
        self._weights, self._adapter, self._rounded_to = weights, adapter, rounded_to
        self._names = [name for name in weights if not is_factor(name)]
        self.lost = LostChange("", 0.0)
        """Largest part of a change that rounding loses, of the weights looked up so far."""

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        module = name.removesuffix(".weight")
        if self._adapter is None or f"{module}.{LORA_B}" not in self._weights:
            return weight
        a, b = (self._weights[f"{module}.{factor}"].float() for factor in (LORA_A, LORA_B))
        change = self._adapter.scale * (b @ a)
        merged = weight.float() + change
        size = change.norm()
        if size > 0:
            loss = (merged.to(self._rounded_to).float() - weight.float() - change).norm() / size
            self.lost = max(self.lost, LostChange(name, float(loss)), key=lambda lost: lost.share)
        return merged

    def __contains__(self, name: object) -> bool:
        return name in self._weights and not is_factor(str(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
