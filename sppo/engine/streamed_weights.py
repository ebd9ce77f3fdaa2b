"""Weights that live in another tier, on the device for the stages that use them.

The program names stages in the order of their use
(:mod:`sppo.schedule.transfers.state_streaming`). The two that were named last are on the device, or
on their way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from sppo.offload.transfers import Done, Transfers
from sppo.schedule.actions import STAGES_HELD


class StreamedWeights(Mapping[str, Tensor]):
    """Weights of the stages in use, on the device, by global name.

    Args:
        rows: what this rank keeps of every parameter of its stages, in the other tier; read at
            every fetch, so an update in place is seen by the next step.
        stages: names of the parameters of each stage; two stages may share one.
        device: that computes.
        transfers: its copies.
    """

    def __init__(
        self,
        rows: Mapping[str, Tensor],
        *,
        stages: Mapping[int, Collection[str]],
        device: torch.device,
        transfers: Transfers,
    ) -> None:
        self.dtype, self.device = next(iter(rows.values())).dtype, device
        self._rows, self._stages, self._transfers = rows, stages, transfers
        self._named: list[int] = []
        self._here: dict[str, Tensor] = {}
        self._coming: dict[int, Done] = {}
        self._peak_bytes = 0

    def fetch(self, stage: int) -> None:
        """Let the weights of a stage come, and those of all but the last one named before go."""
        self._named = [*self._named, stage][-STAGES_HELD:]
        kept = {name for named in self._named for name in self._stages[named]}
        for left in [one for one in self._coming if one not in self._named]:
            self._coming.pop(left).before_compute()
        for name in [name for name in self._here if name not in kept]:
            del self._here[name]
        wanted = [name for name in self._stages[stage] if name not in self._here]
        if not wanted:
            return
        for name in wanted:
            self._here[name] = torch.empty_like(self._rows[name], device=self.device)
        self._coming[stage] = self._transfers.up([(self._here[n], self._rows[n]) for n in wanted])
        held = sum(tensor.numel() for tensor in self._here.values()) * self.dtype.itemsize
        self._peak_bytes = max(self._peak_bytes, held)

    def __getitem__(self, name: str) -> Tensor:
        """Return a parameter of a stage that was fetched; compute issued from now on finds it."""
        arrived = [stage for stage in self._coming if name in self._stages[stage]]
        for stage in arrived:
            self._coming.pop(stage).before_compute()
        return self._here[name]

    def has(self, names: Iterable[str]) -> bool:
        """Return whether parameters are on the device, or on their way."""
        return all(name in self._here for name in names)

    def __iter__(self) -> Iterator[str]:
        """All names, also of what is not on the device."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Return the number of all names."""
        return len(self._rows)

    def forget(self) -> None:
        """Free the device: the step is over."""
        for done in self._coming.values():
            done.before_compute()  # what is freed is used again by compute alone
        self._coming.clear()
        self._named.clear()
        self._here.clear()

    def abort(self) -> None:
        """Free the device: the step failed. Where it no longer answers, all of it stays."""
        if self._transfers.wait_for_device():
            self.forget()

    def take_peak_bytes(self) -> int:
        """Return the most bytes on the device since the last call."""
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak
