"""What a unit takes on a device while it runs: working sets of its layers, messages, exchanges.

All of it is gone when the unit is done, so it counts beside what is held at that moment
(:meth:`sppo.cost.memory.units_in_flight.UnitsInFlight.peak`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from sppo.activations.placement import ActivationPlacement, Counts
from sppo.activations.tensor_classes import CLASSES
from sppo.cost.candidate import Candidate
from sppo.cost.memory.units_in_flight import Running
from sppo.cost.working_set import PREFIX_KEYS, loss_working_set, working_sets
from sppo.schedule.costs import Table

_SIMILAR = 0.9
"""A subsequence at least so long, relative to the longest of its neighbours, counts as that."""


class UnitRun(NamedTuple):
    """A unit, or a shard of one, as its working set depends on it."""

    recomputed: frozenset[int]
    """Tensor classes that backward recomputes."""
    tokens: int
    """All devices of a sequence-parallel group together."""
    prefix: int
    """Tokens of the sequence before it."""


def computing_bytes(candidate: Candidate, placement: ActivationPlacement) -> Running:
    """Working sets of all units, not below the truth: neighbours of similar length share one."""
    shape = len(candidate.stages), len(candidate.lengths)
    running = Running(np.zeros(shape), np.zeros(shape))
    by_kind: dict[Hashable, tuple[Table, Table]] = {}
    for stage, layers in enumerate(candidate.stages):
        kind = len(layers), placement.alike[stage], candidate.is_last_stage(stage)
        if kind not in by_kind:
            by_kind[kind] = _computing_of_stage(candidate, placement, stage=stage)
        running.forward[stage], running.backward[stage] = by_kind[kind]
    return running


def sent_bytes(candidate: Candidate) -> Running:
    """What units receive from neighbouring stages, send there, and exchange in their group."""
    workload, last = candidate.workload, len(candidate.stages) - 1
    lengths = np.array(candidate.lengths, dtype=np.float64)
    neighbours = np.array([[(stage > 0) + (stage < last)] for stage in range(last + 1)])
    row_bytes = 2 * workload.model.hidden_size * workload.element_bytes  # one message each way
    sent = neighbours * (lengths // workload.sequence_parallel_degree * row_bytes)
    sent += exchanged_bytes(candidate, lengths)
    return Running(sent, sent)


def exchanged_bytes(candidate: Candidate, lengths: Table) -> Table:
    """What a sequence-parallel group exchanges for units: with Ulysses q, k, v and o, twice.

    With Megatron what has all tokens where the working set counts a device's own: in the backward
    of the MLP both normed inputs, gathered again, this rank's part of their gradient, and all
    ranks' parts of its own tokens.
    """
    workload = candidate.workload
    model, degree = workload.model, workload.sequence_parallel_degree
    if degree == 1:
        return np.zeros(len(lengths))
    if workload.sequence_parallel == "megatron":
        gathered: Table = 4 * lengths * model.hidden_size * workload.element_bytes
        return gathered
    heads = 2 * (2 * model.num_heads + 2 * model.kv_heads) * model.head_dim
    exchanged: Table = (lengths // degree) * workload.element_bytes * heads
    return exchanged


def loss_bytes(candidate: Candidate, *, tokens: int) -> int:
    """Working set of the loss of a subsequence of `tokens`."""
    here = -(-tokens // candidate.workload.sequence_parallel_degree)
    return loss_working_set(candidate.workload, tokens=here).live_bytes


def run_working_bytes(candidate: Candidate, run: UnitRun, *, stage: int) -> tuple[int, int]:
    """Bytes of the largest working sets of a stage's layers in a forward and in a backward."""
    forward, backward = working_sets(
        candidate.workload,
        tokens=-(-run.tokens // candidate.workload.sequence_parallel_degree),
        prefix=run.prefix,
        recomputed=run.recomputed,
        input_every=candidate.input_every,
        # Further layers take what the first behind those that share an input does.
        layers=min(len(candidate.stages[stage]), candidate.input_every + 1),
    )
    return forward.live_bytes, backward.live_bytes


def unit_runs(
    candidate: Candidate, placement: ActivationPlacement, *, stage: int
) -> tuple[UnitRun, ...]:
    """What a stage computes for each subsequence."""
    starts = accumulate(candidate.lengths, initial=0)
    rows = placement.recomputed[stage].tolist()
    return tuple(
        UnitRun(frozenset(index for index, count in enumerate(counts) if count), tokens, start)
        for counts, tokens, start in zip(rows, candidate.lengths, starts, strict=False)
    )


def _computing_of_stage(
    candidate: Candidate, placement: ActivationPlacement, *, stage: int
) -> tuple[Table, Table]:
    """Working sets of one stage's forwards and backwards, [N] each."""
    kinds = (placement.recomputed[stage] > 0) @ (1 << np.arange(len(CLASSES)))
    forward, backward = np.zeros(len(kinds)), np.zeros(len(kinds))
    for block, runs in _runs_of_blocks(candidate.lengths, kinds.tobytes()):
        sets = [run_working_bytes(candidate, run, stage=stage) for run in runs]
        forward[block], backward[block] = (max(bytes_) for bytes_ in zip(*sets, strict=True))
        if candidate.is_last_stage(stage):
            longest = max(run.tokens for run in runs)
            forward[block] = np.maximum(forward[block], loss_bytes(candidate, tokens=longest))
    return forward, backward


@lru_cache(maxsize=256)
def _runs_of_blocks(
    lengths: tuple[int, ...], kinds: bytes
) -> tuple[tuple[slice, tuple[UnitRun, ...]], ...]:
    """Neighbouring subsequences of similar length, and the heaviest runs among them.

    Args:
        lengths: tokens of each.
        kinds: tensor classes that backward recomputes of each, an int64 with a bit for each class.
    """
    tokens, recomputed = np.array(lengths, dtype=np.int64), np.frombuffer(kinds, dtype=np.int64)
    prefixes = np.minimum(np.cumsum(tokens) - tokens, PREFIX_KEYS)
    return tuple(
        (block, tuple(_heaviest_runs(tokens[block], prefixes[block], recomputed[block])))
        for block in _blocks(lengths)
    )


def _blocks(lengths: Sequence[int]) -> Sequence[slice]:
    """Neighbouring subsequences of similar length; the farther behind, the more of them."""
    edges, longest = [0], lengths[0]
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if length < _SIMILAR * longest and 8 * (index - edges[-1]) >= index:
            edges.append(index)
            longest = length
    return [slice(a, b) for a, b in pairwise([*edges, len(lengths)])]


def _heaviest_runs(lengths: Counts, prefixes: Counts, kinds: Counts) -> Iterator[UnitRun]:
    """Yield the runs of neighbouring units that none other of them outweighs.

    A longer one needs more, and so does one behind a longer prefix, up to the part of a prefix
    that is read at once.

    Args:
        lengths: tokens of each.
        prefixes: tokens before each, as far as they are read at once.
        kinds: tensor classes that backward recomputes of each, a bit for each class.
    """
    for kind in np.unique(kinds).tolist():
        which = np.flatnonzero(kinds == kind)[::-1]
        recomputed = frozenset(index for index in range(len(CLASSES)) if kind >> index & 1)
        behind, longest = prefixes[which], np.maximum.accumulate(lengths[which])
        # The last of those with the same prefix has seen them all, and all behind a longer one.
        ends = np.flatnonzero(np.append(behind[1:] != behind[:-1], True))
        most = 0
        for tokens, prefix in zip(longest[ends].tolist(), behind[ends].tolist(), strict=True):
            if tokens > most:
                most = tokens
                yield UnitRun(recomputed, tokens, prefix)
