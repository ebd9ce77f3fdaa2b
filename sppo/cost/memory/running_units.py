"""What a unit takes on a device while it runs: working sets of its layers, messages, exchanges.

All of it is gone when the unit is done, so it counts beside what is held at that moment
(:meth:`sppo.cost.memory.units_in_flight.UnitsInFlight.peak`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from sppo.activations.placement import ActivationPlacement, Counts
from sppo.activations.tensor_classes import CLASSES, class_bytes_per_token
from sppo.cost.attention_live_sets import SPAN_KEYS
from sppo.cost.candidate import Candidate
from sppo.cost.memory.joined_tensors import block_layout, joined_bytes
from sppo.cost.memory.units_in_flight import Running
from sppo.cost.working_set import loss_working_set, working_sets
from sppo.schedule.costs import Table
from sppo.schedule.generators import DEFERRING_WEIGHTS

_Units = Counts | slice
"""Which of a block's subsequences."""
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
    retained: frozenset[int] = frozenset()
    """Tensor classes of which every row stays on a GPU; empty on a CPU."""


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
        retained=run.retained,
        defers=candidate.schedule in DEFERRING_WEIGHTS,
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
    kinds = _kinds(candidate, placement, stage=stage).tolist()
    return tuple(
        UnitRun(_recomputed(kind), tokens, start, _retained(kind))
        for kind, tokens, start in zip(kinds, candidate.lengths, starts, strict=False)
    )


def _kinds(candidate: Candidate, placement: ActivationPlacement, *, stage: int) -> Counts:
    """Return of each subsequence a bit for each class recomputed, then for each retained, [N].

    On a CPU what is retained is copied, to memory that is there before it and after it.
    """
    bits: Counts = 1 << np.arange(len(CLASSES))
    kinds: Counts = (placement.recomputed[stage] > 0) @ bits
    if candidate.workload.hardware.device.kind == "cuda":
        whole = placement.retained[stage] == placement.tokens[:, None]
        kinds = kinds + (whole @ bits << len(CLASSES))
    return kinds


def _recomputed(kind: int) -> frozenset[int]:
    return frozenset(index for index in range(len(CLASSES)) if kind >> index & 1)


def _retained(kind: int) -> frozenset[int]:
    return _recomputed(kind >> len(CLASSES))


def _computing_of_stage(
    candidate: Candidate, placement: ActivationPlacement, *, stage: int
) -> tuple[Table, Table]:
    """Working sets of one stage's forwards and backwards, [N] each."""
    kinds = _kinds(candidate, placement, stage=stage)
    forward, backward = np.zeros(len(kinds)), np.zeros(len(kinds))
    on_gpu = candidate.workload.hardware.device.kind == "cuda"
    for block, runs in _runs_of_blocks(candidate.lengths, kinds.tobytes(), on_gpu=on_gpu):
        for run, units in runs:
            sets = run_working_bytes(candidate, run, stage=stage)
            for table, live in zip((forward[block], backward[block]), sets, strict=True):
                table[units] = np.maximum(table[units], live)
        if candidate.is_last_stage(stage):
            longest = max(candidate.lengths[block])
            forward[block] = np.maximum(forward[block], loss_bytes(candidate, tokens=longest))
    if on_gpu:
        backward = _with_joined(backward, candidate, placement, stage=stage)
    return forward, backward


def _with_joined(
    backward: Table, candidate: Candidate, placement: ActivationPlacement, *, stage: int
) -> Table:
    """Add tensors put together from parts, whose retained parts go then, [N]."""
    layout = block_layout(candidate, stage=stage)
    joined = joined_bytes(placement, layout, stage=stage)
    sizes = class_bytes_per_token(layout.model, element_bytes=layout.element_bytes)
    is_cut = (placement.retained[stage] > 0) & (placement.offloaded[stage] > 0)
    parts = (placement.retained[stage] * is_cut) @ sizes / layout.shared_by
    found: Table = np.maximum(joined, backward + np.maximum(0, joined - parts))
    return found


@lru_cache(maxsize=256)
def _runs_of_blocks(
    lengths: tuple[int, ...], kinds: bytes, *, on_gpu: bool
) -> tuple[tuple[slice, tuple[tuple[UnitRun, _Units], ...]], ...]:
    """Neighbouring subsequences of similar length, and runs that outweigh all of them.

    Args:
        lengths: tokens of each.
        kinds: of each, see :func:`_kinds`, as int64.
        on_gpu: whether they run on a GPU.

    Returns:
        Pairs of a block of subsequences, and of runs with the subsequences, counted within the
        block, for which they count.
    """
    tokens, of_each = np.array(lengths, dtype=np.int64), np.frombuffer(kinds, dtype=np.int64)
    prefixes = np.minimum(np.cumsum(tokens) - tokens, SPAN_KEYS)
    runs_of: Callable[[Counts, Counts, Counts], Iterator[tuple[UnitRun, _Units]]]
    runs_of = _extreme_runs if on_gpu else _heaviest_runs
    return tuple(
        (block, tuple(runs_of(tokens[block], prefixes[block], of_each[block])))
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


def _extreme_runs(
    lengths: Counts, prefixes: Counts, kinds: Counts
) -> Iterator[tuple[UnitRun, Counts]]:
    """Yield runs that together outweigh all neighbouring units of a kind on a GPU, and those units.

    What backward has freed grows with the subsequence, and what attention takes with the prefix.
    Both do so evenly, so the most is needed by the longest or by the shortest, behind the longest
    prefix.

    Args:
        lengths: tokens of each.
        prefixes: tokens before each, as far as they are read at once.
        kinds: of each, see :func:`_kinds`.
    """
    for kind in np.unique(kinds).tolist():
        which = np.flatnonzero(kinds == kind)
        behind, tokens = int(prefixes[which].max()), lengths[which]
        for extreme in {int(tokens.min()), int(tokens.max())}:
            yield UnitRun(_recomputed(kind), extreme, behind, _retained(kind)), which


def _heaviest_runs(
    lengths: Counts, prefixes: Counts, kinds: Counts
) -> Iterator[tuple[UnitRun, slice]]:
    """Yield the runs of neighbouring units that none other of them outweighs, on a CPU.

    A longer one needs more, and so does one behind a longer prefix, up to the part of a prefix
    that is read at once.

    Args:
        lengths: tokens of each.
        prefixes: tokens before each, as far as they are read at once.
        kinds: of each, see :func:`_kinds`.
    """
    for kind in np.unique(kinds).tolist():
        which = np.flatnonzero(kinds == kind)[::-1]
        behind, longest = prefixes[which], np.maximum.accumulate(lengths[which])
        # The last of those with the same prefix has seen them all, and all behind a longer one.
        ends = np.flatnonzero(np.append(behind[1:] != behind[:-1], True))
        most = 0
        for tokens, prefix in zip(longest[ends].tolist(), behind[ends].tolist(), strict=True):
            if tokens > most:
                most = tokens
                yield UnitRun(_recomputed(kind), tokens, prefix), slice(None)
