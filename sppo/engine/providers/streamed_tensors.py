"""Weights or gradients that live in another tier and are on the device while they are used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from sppo.offload.lane import Lane
from sppo.offload.worker_pool import Event


class StreamedTensors(Mapping[str, Tensor]):
    """Common base of mappings of global names to tensors on the device, which come stage by stage.

    Args:
        in_tier: Tensors in the other tier, for all parameters of the rank's stages.
        device: Device that computes.
        lane: Lane between the device and the other tier.
    """

    def __init__(self, in_tier: Mapping[str, Tensor], *, device: torch.device, lane: Lane) -> None:
        self.dtype, self.device = next(iter(in_tier.values())).dtype, device
        self._in_tier, self.lane = in_tier, lane
        self._here: dict[str, Tensor] = {}
        self._coming: dict[int, Event] = {}
        self._peak_bytes = 0

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names, whether their tensors are on the device or not."""
        return iter(self._in_tier)

    def __len__(self) -> int:
        """Return the number of all names."""
        return len(self._in_tier)

    def free_device_copies(self) -> None:
        """Free all tensors on the device, at the end of a step or after a failed one."""
        self._await_copies([*self._coming])
        self._here.clear()

    def take_peak_bytes(self) -> int:
        """Return the peak bytes on the device since the last call."""
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak

    def _begin_coming(self, stage: int, names: Iterable[str]) -> None:
        """Start to copy tensors of a stage to the device."""
        coming = {n: torch.empty_like(self._in_tier[n], device=self.device) for n in names}
        self._here |= coming
        self._coming[stage] = self.lane.back(
            [(tensor, self._in_tier[name]) for name, tensor in coming.items()],
            after=[self.lane.computed([])],
        )
        self._count()

    def _await_copies(self, stages: Iterable[int]) -> None:
        """Let compute that is issued from now on wait for the copies of ``stages`` to the device.

        That suffices before memory is freed, too, because only compute reuses it.
        """
        for stage in stages:
            if stage in self._coming:
                self.lane.before_compute(self._coming.pop(stage))

    def _count(self, leaving: Iterable[Tensor] = ()) -> None:
        """Note the bytes on the device, with tensors that are ``leaving``."""
        held = sum(tensor.numel() for tensor in (*self._here.values(), *leaving))
        self._peak_bytes = max(self._peak_bytes, held * self.dtype.itemsize)
