"""Rows of weights and gradient sums that live in another tier, on the device for their stage.

The program fetches weights in the order of their use, and the weights of the two stages fetched
last are on the device, or being copied. The program also says when the sums of a stage leave, and
when they return for a later phase of the stage (:mod:`sppo.schedule.transfers.copies`). At
the end of a step all sums have left, or are being copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sppo.offload.lane import Lane
from sppo.offload.worker_pool import Event, wait_for
from sppo.schedule.actions import RESIDENT_STAGES


class StreamedRows(Mapping[str, Tensor]):
    """Common base of mappings of keys to rows on the device, which come stage by stage.

    Args:
        in_tier: Rows of all stages of the rank in the other tier, by key.
        stages: Keys of the rows of each stage; two stages may share a row. Those of rows that are
            not in the tier are ignored.
        device: Device that computes.
        lane: Lane between the device and the other tier.
        staying: Further rows, which stay on the device, by key.
    """

    def __init__(
        self,
        in_tier: Mapping[str, Tensor],
        *,
        stages: Mapping[int, Collection[str]],
        device: torch.device,
        lane: Lane,
        staying: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        rows = (*in_tier.values(), *staying.values())
        self.dtype = rows[0].dtype if rows else torch.float32
        self.device, self._lane = device, lane
        self._in_tier, self._staying = in_tier, staying
        self._stages = {
            stage: [key for key in keys if key in in_tier] for stage, keys in stages.items()
        }
        self._here: dict[str, Tensor] = {}
        self._coming: dict[str, Event] = {}
        self._peak_bytes = 0

    def __iter__(self) -> Iterator[str]:
        """Iterate over all keys, whether their rows are on the device or not."""
        yield from self._in_tier
        yield from self._staying

    def __len__(self) -> int:
        """Return the number of all keys."""
        return len(self._in_tier) + len(self._staying)

    def has(self, keys: Iterable[str]) -> bool:
        """Return whether all these rows are on the device, or being copied to it."""
        return all(key in self._here or key in self._staying for key in keys)

    def take_peak_bytes(self) -> int:
        """Return the peak bytes on the device since the last call."""
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak

    def close(self) -> None:
        """End all copies after a failed step; keep the rows that copies may still use."""
        if self._lane.close():
            self._drop()

    def _drop(self) -> None:
        """Drop all rows on the device, and the events of their copies, which may hold rows too."""
        self._here.clear()
        self._coming.clear()

    def _begin_coming(self, keys: Iterable[str]) -> None:
        """Start to copy rows to the device."""
        coming = {key: torch.empty_like(self._in_tier[key], device=self.device) for key in keys}
        self._here |= coming
        copies = [(row, self._in_tier[key]) for key, row in coming.items()]
        event = self._lane.back(copies, after=[self._lane.computed([])])
        self._coming |= dict.fromkeys(coming, event)
        self._count()

    def _await_copy(self, key: str) -> None:
        """Let compute that is issued from now on wait for the copy of a row to the device.

        That suffices before memory is freed, too, because only compute reuses it.
        """
        if key in self._coming:
            self._lane.before_compute(self._coming.pop(key))

    def _count(self, leaving: Iterable[Tensor] = ()) -> None:
        """Note the bytes on the device, with rows that are ``leaving``."""
        held = sum(row.nbytes for row in (*self._here.values(), *leaving))
        self._peak_bytes = max(self._peak_bytes, held)


class StreamedWeights(StreamedRows):
    """Rows of weights on the device, of the stages in use, and rows that stay there.

    The other tier is read at every fetch, so that the next step sees an update in place.
    """

    def __init__(self, in_tier: Mapping[str, Tensor], **options: Any) -> None:
        super().__init__(in_tier, **options)
        self._named: list[int] = []

    def fetch(self, stage: int) -> None:
        """Start to copy a stage's weights to the device; free all but the previous stage's."""
        self._named = [*self._named, stage][-RESIDENT_STAGES:]
        self._free_all_but({key for named in self._named for key in self._stages[named]})
        wanted = [key for key in self._stages[stage] if key not in self._here]
        if wanted:
            self._begin_coming(wanted)

    def __getitem__(self, key: str) -> Tensor:
        """Return a row of a fetched stage; compute issued from now on waits for its copy."""
        self._await_copy(key)
        return self._staying[key] if key in self._staying else self._here[key]

    def end_step(self) -> None:
        """Free all weights on the device."""
        self._named.clear()
        self._free_all_but(())

    def _free_all_but(self, kept: Collection[str]) -> None:
        for key in [key for key in self._here if key not in kept]:
            self._await_copy(key)
            del self._here[key]


class StreamedGradients(StreamedRows):
    """Rows of fp32 gradient sums on the device, zero at first in each step.

    Each step overwrites the other tier. A row that two stages share belongs to the first of them,
    and leaves only once, when it is complete.
    """

    def __init__(self, in_tier: Mapping[str, Tensor], **options: Any) -> None:
        super().__init__(in_tier, **options)
        self._stage_of: dict[str, int] = {}
        self._shared: set[str] = set()
        for stage in sorted(self._stages):
            self._shared.update(key for key in self._stages[stage] if key in self._stage_of)
            self._stage_of = dict.fromkeys(self._stages[stage], stage) | self._stage_of
        self._leaving: tuple[Event, list[Tensor]] | None = None

    def __getitem__(self, key: str) -> Tensor:
        """Return the sums to add to; compute issued from now on waits for their copy."""
        self._await_copy(key)
        if key not in self._here:
            self._here[key] = torch.zeros_like(self._in_tier[key], device=self.device)
            self._count(leaving=[] if self._leaving is None else self._leaving[1])
        return self._here[key]

    def leave(self, stage: int, *, complete: bool) -> None:
        """Start to copy the sums of a stage to the other tier, after earlier copies are done.

        Args:
            stage: Stage whose sums leave.
            complete: Whether the step adds nothing more to the sums; rows that two stages share
                leave only then.
        """
        keys = self._owned(stage, with_shared=complete)
        copies = [(self._in_tier[key], self[key]) for key in keys]
        self._make_room()
        sources = [source for _, source in copies]
        self._leaving = self._lane.out(copies, after=[self._lane.computed(sources)]), sources
        for key in keys:
            del self._here[key]

    def bring_back(self, stage: int) -> None:
        """Start to copy the sums of a stage back, after the last ones to leave are freed."""
        self._make_room()
        self._begin_coming(self._owned(stage, with_shared=False))

    def end_step(self) -> None:
        """Assert that all sums have left; the last copies may be in flight until :meth:`arrive`."""
        assert not self._here, f"gradients left on the device: {[*self._here][:3]}"

    def arrive(self) -> None:
        """Block the host until all sums are in the other tier and may be read there.

        The device must have finished the step: the wait has no timeout.
        """
        if self._leaving is not None:
            wait_for(self._leaving[0])
        self._make_room()

    def _drop(self) -> None:
        super()._drop()
        self._leaving = None

    def _owned(self, stage: int, *, with_shared: bool) -> list[str]:
        """Return the keys of a stage's rows that belong to it."""
        own = (key for key in self._stages[stage] if self._stage_of[key] == stage)
        return [key for key in own if with_shared or key not in self._shared]

    def _make_room(self) -> None:
        """Free the sums that left last, once their copy is done."""
        if self._leaving is None:
            return
        done, rows = self._leaving
        self._leaving = None
        self._lane.before_compute(done)  # only compute reuses the memory
        rows.clear()
