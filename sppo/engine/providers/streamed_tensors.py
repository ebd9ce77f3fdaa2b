"""Weights and gradient sums that live in another tier, on the device while their stage runs.

The program fetches weights in the order of their use, and the weights of the two stages fetched
last are on the device, or being copied. The program also says when the sums of a stage leave, and
when they return for a later phase of the stage (:mod:`sppo.schedule.transfers.state_streaming`). At
the end of a step all sums have left, or are being copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sppo.offload.lane import Lane
from sppo.offload.worker_pool import Event, wait_for
from sppo.schedule.actions import RESIDENT_STAGES


class StreamedTensors(Mapping[str, Tensor]):
    """Common base of mappings of names to tensors on the device, which come stage by stage.

    Args:
        in_tier: Rows, or parameters, of all stages of the rank in the other tier, by name.
        stages: Names of the tensors of each stage; two stages may share a tensor.
        device: Device that computes.
        lane: Lane between the device and the other tier.
    """

    def __init__(
        self,
        in_tier: Mapping[str, Tensor],
        *,
        stages: Mapping[int, Collection[str]],
        device: torch.device,
        lane: Lane,
    ) -> None:
        self.dtype, self.device = next(iter(in_tier.values())).dtype, device
        self._in_tier, self._stages, self.lane = in_tier, stages, lane
        self._here: dict[str, Tensor] = {}
        self._coming: dict[int, Event] = {}
        self._peak_bytes = 0

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names, whether their tensors are on the device or not."""
        return iter(self._in_tier)

    def __len__(self) -> int:
        """Return the number of all names."""
        return len(self._in_tier)

    def has(self, names: Iterable[str]) -> bool:
        """Return whether all named tensors are on the device, or being copied to it."""
        return all(name in self._here for name in names)

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


class StreamedWeights(StreamedTensors):
    """Mapping of names to the weights on the device, of the stages in use.

    The other tier is read at every fetch, so that the next step sees an update in place.
    """

    def __init__(self, in_tier: Mapping[str, Tensor], **options: Any) -> None:
        super().__init__(in_tier, **options)
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
        """Return a tensor of a fetched stage; compute issued from now on waits for its copy."""
        self._await_copies([stage for stage in self._coming if name in self._stages[stage]])
        return self._here[name]

    def free_device_copies(self) -> None:
        """Free all weights on the device, at the end of a step or after a failed one."""
        super().free_device_copies()
        self._named.clear()


class StreamedGradients(StreamedTensors):
    """Mapping of names to fp32 gradient sums on the device, zero at first in each step.

    Each step overwrites the other tier. A tensor that two stages share belongs to the first of
    them, and leaves only once, when it is complete.
    """

    def __init__(self, in_tier: Mapping[str, Tensor], **options: Any) -> None:
        super().__init__(in_tier, **options)
        self._stage_of: dict[str, int] = {}
        self._shared: set[str] = set()
        for stage in sorted(self._stages):
            self._shared.update(name for name in self._stages[stage] if name in self._stage_of)
            self._stage_of = dict.fromkeys(self._stages[stage], stage) | self._stage_of
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
            complete: Whether the step adds nothing more to the sums; tensors that two stages share
                leave only then.
        """
        names = self._owned(stage, with_shared=complete)
        copies = [(self._in_tier[name], self[name]) for name in names]
        self._make_room()
        sources = [source for _, source in copies]
        self._leaving = self.lane.out(copies, after=[self.lane.computed(sources)]), sources
        for name in names:
            del self._here[name]

    def bring_back(self, stage: int) -> None:
        """Start to copy the sums of a stage back, after the last ones to leave are freed."""
        self._make_room()
        self._begin_coming(stage, self._owned(stage, with_shared=False))

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

    def _owned(self, stage: int, *, with_shared: bool) -> list[str]:
        """Return the names of a stage's tensors that belong to it."""
        own = (name for name in self._stages[stage] if self._stage_of[name] == stage)
        return [name for name in own if with_shared or name not in self._shared]

    def _make_room(self) -> None:
        """Free the sums that left last, once their copy is done."""
        if self._leaving is None:
            return
        done, tensors = self._leaving
        self._leaving = None
        self.lane.before_compute(done)  # only compute reuses the memory
        tensors.clear()
