"""Gradient sums that live in another tier, on the device while their stage adds to them.

The program says when the sums of a stage leave, and when they return for a later phase of the stage
(:mod:`sppo.schedule.transfers.state_streaming`). At the end of a step all sums have left, or are
being copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from sppo.engine.providers.streamed_tensors import StreamedTensors
from sppo.offload.lane import Lane
from sppo.offload.worker_pool import Event, wait_for


class StreamedGradients(StreamedTensors):
    """Mapping of global names to fp32 gradient sums on the device, zero at first in each step.

    A parameter that two stages share belongs to the first of them, and leaves only once, when it is
    complete.

    Args:
        sums: Sums in the other tier, for all parameters of the rank's stages; each step overwrites
            them.
        stages: Global names of the parameters of each stage.
        device: Device that computes.
        lane: Lane between the device and the other tier.
    """

    def __init__(
        self,
        sums: Mapping[str, Tensor],
        *,
        stages: Mapping[int, Collection[str]],
        device: torch.device,
        lane: Lane,
    ) -> None:
        super().__init__(sums, device=device, lane=lane)
        owners: dict[str, int] = {}
        users: dict[str, int] = {}
        for stage in sorted(stages):
            for name in stages[stage]:
                owners.setdefault(name, stage)
                users[name] = users.get(name, 0) + 1
        self._shared = {name for name, count in users.items() if count > 1}
        self._owned: dict[int, list[str]] = {stage: [] for stage in stages}
        for name, owner in owners.items():
            self._owned[owner].append(name)
        self._stage_of = owners
        self._leaving: tuple[Event, list[Tensor]] | None = None

    def __getitem__(self, name: str) -> Tensor:
        """Return the sum to add to; compute issued from now on waits for the copy to the device."""
        self._await_copies([self._stage_of[name]])
        if name not in self._here:
            self._here[name] = torch.zeros_like(self._in_tier[name], device=self.device)
            self._count(leaving=[] if self._leaving is None else self._leaving[1])
        return self._here[name]

    def leave(self, stage: int, *, complete: bool) -> None:
        """Start to copy the sums of a stage to the other tier, after earlier copies are done.

        Args:
            stage: Stage whose sums leave.
            complete: Whether the step adds nothing more to the sums; parameters that two stages
                share leave only then.
        """
        names = [name for name in self._owned[stage] if complete or name not in self._shared]
        copies = [(self._in_tier[name], self[name]) for name in names]
        self._make_room()
        sources = [source for _, source in copies]
        self._leaving = self.lane.out(copies, after=[self.lane.computed(sources)]), sources
        for name in names:
            del self._here[name]

    def bring_back(self, stage: int) -> None:
        """Start to copy the sums of a stage back, after the last ones to leave are freed."""
        self._make_room()
        self._begin_coming(stage, [n for n in self._owned[stage] if n not in self._shared])

    def arrive(self) -> None:
        """Block the host until all sums are in the other tier and may be read there.

        The device must have finished the step: the wait has no timeout.
        """
        if self._leaving is not None:
            wait_for(self._leaving[0])
        self._make_room()

    @property
    def names_here(self) -> list[str]:
        """Names of the sums on the device that are not leaving."""
        return [*self._here]

    def free_device_copies(self) -> None:
        """Free all sums on the device, after a failed step."""
        self._make_room()
        super().free_device_copies()

    def _make_room(self) -> None:
        """Free the sums that left last, once their copy is done."""
        if self._leaving is None:
            return
        done, tensors = self._leaving
        self._leaving = None
        self.lane.before_compute(done)  # only compute reuses the memory
        tensors.clear()
