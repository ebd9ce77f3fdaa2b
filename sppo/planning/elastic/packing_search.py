"""Search for the ways to pack the samples of a step that a pipeline may run fastest.

Subsequences that take t on one device take about ``(sum t + (p - 1) / v max t) / p`` on a pipeline
of p ranks with v stages each, the time of a flow shop of equal machines. Packings of several sizes
of subsequences are ranked by this estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sppo.activations.placement import ROW_ALIGNMENT
from sppo.cost.candidate import Candidate
from sppo.cost.layer import ACCUMULATION_BYTES
from sppo.planning.elastic.mesh import SliceMesh, mesh_of_first_slice, mesh_of_slices
from sppo.planning.elastic.packing import PackedSamples, pack_samples, subsequence_seconds
from sppo.planning.elastic.sample_cost import SampleCost, sample_cost

LEAST_TOKENS = 256
"""Tokens below which subsequences are not cut to fill a pipeline."""
_MOST_PER_RANK = 128
"""Subsequences per pipeline rank above which smaller subsequences are not tried."""
_ROOMS = (2, 1)
"""Most tokens of a subsequence of several samples, relative to a first slice. Short samples take
less attention, so equal time allows more tokens."""
_LEAST_SLICES = (1 / 8, 0.0, 1 / 4, 1 / 2)
"""Least tokens of later slices, relative to a first slice."""
_HALF_STEPS = (2**-0.5, 2**0.5)
"""Factors of the best first slice that are tried between powers of two."""
_SHORT_SAMPLES = 4096
"""Most tokens of first slices that are tried; twice the longest sample if that is more."""
_PRICED = 4
"""Tokens of the largest subsequence that is priced, relative to the largest first slice."""


@dataclass(frozen=True, slots=True)
class PackingSearch:
    """Packings of the samples of steps of one run.

    Attributes:
        base: Candidate of the run's plan, whose sequences are replaced in each step.
        longest: Tokens of the longest sample.
        slices: Number of subsequences that the run's plan cuts the longest sample into.
        alignment: Cuts of samples fall on multiples of this number.
        tries_sizes: Whether other numbers of slices may be tried, on several pipeline ranks.
        room: Most tokens per device of a subsequence, for the sizes that are tried on one pipeline
            rank; 0 to use only the sizes of the run's plan.
    """

    base: Candidate
    longest: int
    slices: int
    alignment: int
    tries_sizes: bool
    room: int = 0

    def packings(self, lengths: Sequence[int], *, quick: bool = False) -> list[PackedSamples]:
        """Return the packings to try, by estimated time, the fastest first.

        Args:
            lengths: Tokens of each sample.
            quick: Whether to try only sizes that double.
        """
        if self.room:
            packings = [self._packing(lengths, mesh) for mesh in self._meshes_of_one_rank]
            different = {packing.sequences: packing for packing in reversed(packings)}
            return sorted(different.values(), key=lambda packing: packing.least_s)
        if not self.tries_sizes:
            return self.as_planned(lengths)
        rough = [self._sized(lengths, first) for first in self._first_slices(lengths)]
        if quick:
            return sorted(rough, key=lambda packing: packing.least_s)
        best = min(rough, key=lambda packing: packing.least_s)
        more = [
            *(
                self._sized(lengths, max(self._least_first, round(best.first * factor)))
                for factor in _HALF_STEPS
            ),
            *(
                self._sized(lengths, best.first, least=least, room=room)
                for least in _LEAST_SLICES
                for room in _ROOMS
                if (least, room) != (_LEAST_SLICES[0], _ROOMS[0])
            ),
            # If memory is short, the largest packing that fits lies between these sizes.
            *(
                self._sized(lengths, max(self._least_first, round(first * factor)), room=_ROOMS[1])
                for first in (packing.first for packing in rough if packing.first < best.first)
                for factor in (1.0, _HALF_STEPS[1])
            ),
        ]
        different = {packing.sequences: packing for packing in (*rough, *more)}
        return sorted(different.values(), key=lambda packing: packing.least_s)

    def as_planned(self, lengths: Sequence[int]) -> list[PackedSamples]:
        """Return the packing by the mesh of the run's plan, as the only one."""
        return [self._packing(lengths, self._mesh_of_slices(self.slices))]

    @property
    def _meshes_of_one_rank(self) -> Iterator[SliceMesh]:
        """Meshes of equal tokens per slice: that of the run's plan, and smaller and larger ones."""
        sizes = [self.room // 2]
        # All devices together may hold a subsequence of as many times the room.
        most = min(self.longest, self.room * self.base.workload.sequence_parallel_degree)
        while sizes[-1] < most:
            sizes.append(2 * sizes[-1])
        planned = self._mesh_of_slices(self.slices)
        yield from (planned, replace(planned, room=max(planned.room, self.room)))
        for size in sizes:
            mesh = self._mesh_of_slices(-(-self.longest // size))
            yield replace(mesh, room=max(mesh.room, size))

    def _mesh_of_slices(self, slices: int) -> SliceMesh:
        return mesh_of_slices(
            self.cost,
            longest=self.longest,
            slices=slices,
            balanced=self.base.pipeline_parallel_degree > 1,
            alignment=self.alignment,
        )

    def _first_slices(self, lengths: Sequence[int]) -> list[int]:
        """Return the tokens of a first slice to try.

        These double from the least, and give each rank at least one subsequence and not too many.
        """
        ranks, cost = self.base.pipeline_parallel_degree, self.cost
        each_s = sum(cost.of_samples(lengths)) / ranks
        least = self._least_first
        doublings = int(np.log2(self._most_tokens / _PRICED / least))
        sizes = least * 2.0 ** np.arange(max(1, doublings + 1))
        seconds = np.array(cost.of_samples(sizes.astype(np.int64).tolist()))
        fits = (seconds <= each_s) & (seconds * _MOST_PER_RANK >= each_s)
        if fits.any():
            return [int(size) for size in sizes[fits]]
        # With much work even the largest size makes many units; with little, take the smallest.
        return [int(sizes[-1]) if seconds[-1] <= each_s else least]

    def _sized(
        self,
        lengths: Sequence[int],
        first: int,
        *,
        least: float = _LEAST_SLICES[0],
        room: float = _ROOMS[0],
    ) -> PackedSamples:
        """Return the packing into subsequences that take as long as a first slice."""
        mesh = mesh_of_first_slice(
            self.cost,
            longest=self.longest,
            first=first,
            least=max(round(least * first), self.base.workload.sequence_parallel_degree),
            room=round(room * first),
            alignment=min(self.alignment, first),
        )
        return self._packing(lengths, mesh, first=first)

    def _packing(self, lengths: Sequence[int], mesh: SliceMesh, *, first: int = 0) -> PackedSamples:
        """Return the packing by a mesh, with its estimated time."""
        packed = pack_samples(
            lengths,
            cost=self.cost,
            mesh=mesh,
            least_tokens=self.base.workload.sequence_parallel_degree,
            multiple=self.multiple,
        )
        seconds = subsequence_seconds(packed, cost=self.cost)
        ranks = self.base.pipeline_parallel_degree
        filling_s = (ranks - 1) / self.base.virtual_stages * seconds.max()
        least_s = float(seconds.sum() + filling_s) / ranks
        return replace(packed, least_s=least_s, first=first)

    @property
    def multiple(self) -> int:
        """Number of tokens to a multiple of which subsequences are padded.

        On a CPU, matrix products in half precision compile code for every number of rows, MiBs that
        are never freed. With 600 random lengths and a hidden size of 128, steps without padding
        took 1.4 GiB and three times as long.
        """
        workload = self.base.workload
        narrow = workload.element_bytes < ACCUMULATION_BYTES
        on_cpu = workload.hardware.device.kind == "cpu"
        return ROW_ALIGNMENT if narrow and on_cpu else 1

    @property
    def _least_first(self) -> int:
        """Tokens of the smallest first slice to try."""
        return max(LEAST_TOKENS, self.base.workload.sequence_parallel_degree)

    @property
    def _most_tokens(self) -> int:
        """Tokens of the largest subsequence that can be priced."""
        return _PRICED * max(2 * self.longest, _SHORT_SAMPLES)

    @property
    def cost(self) -> SampleCost:
        """Cost model of parts of samples."""
        return sample_cost(self.base.workload, most_tokens=self._most_tokens)
