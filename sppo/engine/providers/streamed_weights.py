"""Weights that live in another tier and are copied to the device stage by stage.

The program fetches stages in the order of their use
(:mod:`sppo.schedule.transfers.state_streaming`). The weights of the two stages fetched last are on
the device, or being copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from sppo.engine.providers.streamed_tensors import StreamedTensors
from sppo.offload.lane import Lane
from sppo.schedule.actions import RESIDENT_STAGES


class StreamedWeights(StreamedTensors):
    """Mapping of global names to the weights on the device, of the stages in use.

    Args:
        rows: This rank's rows of every parameter of its stages, in the other tier; read at every
            fetch, so that the next step sees an update in place.
        stages: Global names of the parameters of each stage; two stages may share a parameter.
        device: Device that computes.
        lane: Lane between the device and the other tier.
    """

    def __init__(
        self,
        rows: Mapping[str, Tensor],
        *,
        stages: Mapping[int, Collection[str]],
        device: torch.device,
        lane: Lane,
    ) -> None:
        super().__init__(rows, device=device, lane=lane)
        self._stages = stages
        self._named: list[int] = []

    def fetch(self, stage: int) -> None:
        """Start to copy a stage's weights to the device; free all but the previous stage's."""
        self._named = [*self._named, stage][-RESIDENT_STAGES:]
        kept = {name for named in self._named for name in self._stages[named]}
        self._await_copies([one for one in self._coming if one not in self._named])
        for name in [name for name in self._here if name not in kept]:
            del self._here[name]
        wanted = [name for name in self._stages[stage] if name not in self._here]
        if wanted:
            self._begin_coming(stage, wanted)

    def __getitem__(self, name: str) -> Tensor:
        """Return a parameter of a fetched stage; compute issued from now on waits for its copy."""
        self._await_copies([stage for stage in self._coming if name in self._stages[stage]])
        return self._here[name]

    def has(self, names: Iterable[str]) -> bool:
        """Return whether all named parameters are on the device, or being copied to it."""
        return all(name in self._here for name in names)

    def free_device_copies(self) -> None:
        """Free all weights on the device, at the end of a step or after a failed one."""
        super().free_device_copies()
        self._named.clear()
