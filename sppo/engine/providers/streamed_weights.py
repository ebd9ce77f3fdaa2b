"""Weights that live in another tier and are copied to the device stage by stage.

The program fetches stages in the order of their use
(:mod:`sppo.schedule.transfers.state_streaming`). The weights of the two stages fetched last are on
the device, or being copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from sppo.offload.lane import Event, Lane
from sppo.schedule.actions import RESIDENT_STAGES


class StreamedWeights(Mapping[str, Tensor]):
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
        self.dtype, self.device = next(iter(rows.values())).dtype, device
        self._rows, self._stages, self.lane = rows, stages, lane
        self._named: list[int] = []
        self._here: dict[str, Tensor] = {}
        self._coming: dict[int, Event] = {}
        self._peak_bytes = 0

    def fetch(self, stage: int) -> None:
        """Start to copy a stage's weights to the device; free all but the previous stage's."""
        self._named = [*self._named, stage][-RESIDENT_STAGES:]
        kept = {name for named in self._named for name in self._stages[named]}
        for left in [one for one in self._coming if one not in self._named]:
            self.lane.before_compute(self._coming.pop(left))
        for name in [name for name in self._here if name not in kept]:
            del self._here[name]
        wanted = [name for name in self._stages[stage] if name not in self._here]
        if not wanted:
            return
        for name in wanted:
            self._here[name] = torch.empty_like(self._rows[name], device=self.device)
        self._coming[stage] = self.lane.back(
            [(self._here[n], self._rows[n]) for n in wanted], after=[self.lane.computed([])]
        )
        held = sum(tensor.numel() for tensor in self._here.values()) * self.dtype.itemsize
        self._peak_bytes = max(self._peak_bytes, held)

    def __getitem__(self, name: str) -> Tensor:
        """Return a parameter of a fetched stage; compute issued from now on waits for its copy."""
        arrived = [stage for stage in self._coming if name in self._stages[stage]]
        for stage in arrived:
            self.lane.before_compute(self._coming.pop(stage))
        return self._here[name]

    def has(self, names: Iterable[str]) -> bool:
        """Return whether all named parameters are on the device, or being copied to it."""
        return all(name in self._here for name in names)

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names, whether their weights are on the device or not."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Return the number of all names."""
        return len(self._rows)

    def free_device_copies(self) -> None:
        """Free all weights on the device, at the end of a step."""
        for done in self._coming.values():
            self.lane.before_compute(
                done
            )  # ordering with compute suffices: only compute reuses the memory
        self._coming.clear()
        self._named.clear()
        self._here.clear()

    def take_peak_bytes(self) -> int:
        """Return the peak bytes on the device since the last call."""
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak
