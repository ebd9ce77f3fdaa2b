"""Engine of one pipeline rank that runs planned steps of samples, for ``compare_elastic.py``."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from elastic_sides import Request  # beside this file
from pipeline_ranks import TIMEOUT  # beside this file

from sppo.cost.packed_sequence import PackedSequence
from sppo.planning.corpus.packings import Piece
from sppo.planning.corpus.sides import SideStep

if TYPE_CHECKING:
    from torch import Tensor

    from sppo.engine.engine import StepResult
    from sppo.engine.unit import SequenceData
    from sppo.parallel.pipeline_p2p import PipelineLinks
    from sppo.training.ranks import Ranks


@dataclass(frozen=True, slots=True)
class JoinedRank:
    """Rank that is connected to the other ranks."""

    ranks: Ranks
    links: PipelineLinks


def join(rank: int, ranks: int) -> JoinedRank:
    """Connect this rank to the pipeline, which is the default process group."""
    import torch

    from sppo.kernels.native.cpu_allocator import install_cpu_allocator
    from sppo.parallel.host_collectives import HostCollectives
    from sppo.parallel.mesh import Mesh
    from sppo.parallel.mesh_shape import MeshShape
    from sppo.parallel.pipeline_p2p import PipelineLinks
    from sppo.training.ranks import Ranks

    install_cpu_allocator()
    shape = MeshShape(pipeline_parallel=ranks)
    mesh = Mesh(shape, rank=rank, timeout_s=TIMEOUT.total_seconds()).connect(wraps=True)
    together = Ranks(mesh, HostCollectives(mesh), None)  # type: ignore[arg-type]
    return JoinedRank(together, PipelineLinks(mesh, device=torch.device("cpu")))


class RankEngine:
    """Engine of one rank, for the steps of all sides with the same number of stages on a rank.

    Args:
        request: Request to compare.
        joined: This rank.
        virtual_stages: Number of stages on every rank.
    """

    def __init__(self, request: Request, joined: JoinedRank, *, virtual_stages: int) -> None:
        from sppo.config.model import ModelConfig
        from sppo.cost.parameters import stage_shapes
        from sppo.engine.engine import Engine
        from sppo.engine.pipeline import Pipeline
        from sppo.kernels.native.cpu_allocator import install_cpu_allocator
        from sppo.model.gradients import zero_gradients
        from sppo.model.initialize import initial_weights
        from sppo.training.state_tensors import DTYPES

        self._pool = install_cpu_allocator()
        model = ModelConfig.model_validate(request.model)
        self.ranks = joined.ranks
        shape, at = joined.ranks.mesh.shape, joined.ranks.mesh.at
        # Every step has its own program; this schedule makes the programs of the warm-up.
        schedule = "sppo" if virtual_stages == 1 else "looped_bfs"
        pipeline = Pipeline(
            schedule, shape.pipeline_parallel, at.pipeline, virtual_stages, p2p=joined.links
        )
        everything = initial_weights(model, seed=0)
        weights = {
            name: everything[name].to(DTYPES[request.dtype])
            for layers in pipeline.layers(model.num_layers).values()
            for name in stage_shapes(model, layers)
        }
        self._gradients = zero_gradients(weights)
        self.state_bytes = sum(
            tensor.nbytes for tensor in (*weights.values(), *self._gradients.values())
        )
        self._engine = Engine(
            model, weights=weights, gradients=self._gradients, policy="retain", pipeline=pipeline
        )
        self._samples = [
            _tokens_of_samples(lengths, vocab_size=model.vocab_size, seed=step)
            for step, lengths in enumerate(request.lengths)
        ]
        self._running: tuple[SideStep, list[SequenceData]] | None = None
        self.done: StepResult | None = None

    def warm_up(self, step: SideStep) -> None:
        """Run the first subsequence of a step's first sequence, which loads libraries."""
        from sppo.engine.unit import SequenceData

        tokens = step.plan.sequences[0].lengths[0]
        tokens_S = self._samples[0][0].new_zeros(tokens)
        self._engine.accumulate([SequenceData(tokens_S, tokens_S)], [(0, tokens)])

    def begin(self, step: SideStep, index: int) -> None:
        """Make the data of a step and clear the gradients."""
        import torch

        data = [
            _sequence_data(sequence, pieces, self._samples[index])
            for sequence, pieces in zip(step.plan.sequences, step.packing.pieces, strict=True)
        ]
        self._running, self.done = (step, data), None
        torch._foreach_zero_(list(self._gradients.values()))
        gc.collect()
        self.take_saved_bytes()

    def step(self) -> None:
        """Run forward and backward of all sequences."""
        from sppo.engine.step_programs import PlannedStep

        assert self._running is not None, "a step has begun"
        step, data = self._running
        boundaries = [sequence.boundaries for sequence in step.plan.sequences]
        planned = PlannedStep(step.plan.program, step.plan.placements)
        self.done = self._engine.accumulate(data, boundaries, planned=planned)

    def resident_bytes_of_step(self) -> int:
        """Run the step; return the process's peak bytes above what it needs before the step."""
        from sppo.kernels.native.process_memory import (
            peak_resident_bytes,
            reset_peak,
            resident_bytes,
        )

        if self._pool is not None:
            self._pool.trim()
        ctypes.CDLL(None).malloc_trim(0)
        idle_bytes = resident_bytes()
        reset_peak()
        self.step()
        return peak_resident_bytes() - idle_bytes

    def take_saved_bytes(self) -> int:
        """Return the peak bytes of saved activations and K/V since the last call."""
        peaks = self._engine.take_peaks()
        return peaks.activations_bytes + peaks.kv_bytes


def _tokens_of_samples(lengths: Sequence[int], *, vocab_size: int, seed: int) -> list[Tensor]:
    """Return random token ids of each sample, one more than its tokens: the last is a label."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (tokens + 1,), generator=generator) for tokens in lengths]


def _sequence_data(
    sequence: PackedSequence, pieces: Sequence[Piece], samples: Sequence[Tensor]
) -> SequenceData:
    """Return the data of a sequence of pieces of samples, padded to its tokens."""
    import torch

    from sppo.engine.unit import SequenceData
    from sppo.kernels.labels import IGNORED_LABEL

    padding = sequence.tokens - sum(piece.tokens for piece in pieces)
    nothing = samples[0].new_zeros(padding)
    return SequenceData(
        torch.cat([*(samples[sample][begin:end] for sample, begin, end in pieces), nothing]),
        torch.cat(
            [
                *(samples[sample][begin + 1 : end + 1] for sample, begin, end in pieces),
                nothing + IGNORED_LABEL,
            ]
        ),
        tuple(accumulate(sequence.samples[:-1], initial=0)),
    )
