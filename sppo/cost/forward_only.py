"""Costs of evaluating sequences with the layout of a training step: forwards alone.

Weights, gradients and optimizer states stay where training has them. Nothing is saved for backward:
K and V of a sequence leave a stage with the stage's last subsequence, and in layers with a sliding
window as soon as no later subsequence sees them. Linear attention keeps its newest states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_of_sequences
from sppo.cost.layer import head_parts, saving_seconds, summed
from sppo.cost.linear_attention.states import states_of_units
from sppo.cost.live_sets.working_set import same_prefixes
from sppo.cost.memory.messages import exchanged_bytes, sent_bytes, tokens_held
from sppo.cost.memory.stage_memory import MemoryBuckets, StageMemory
from sppo.cost.memory.unit_working_sets import loss_bytes, running_bytes
from sppo.cost.sharding.weight_parts import rank_parts
from sppo.cost.stages.stage_cost import costs_without_activations
from sppo.cost.workload import ACCUMULATION_BYTES
from sppo.schedule.actions import ActionKind
from sppo.schedule.costs import Costs, Table
from sppo.schedule.program import forward_program
from sppo.schedule.schedule import Schedule


def forward_costs(candidate: Candidate) -> Costs:
    """Return the costs of the forwards of a candidate's sequences if nothing is saved."""
    candidate = _layout(candidate)
    workload, costs = candidate.workload, costs_without_activations(candidate)
    tokens = np.array(candidate.lengths * candidate.sequences, dtype=np.float64)
    less = candidate.sums_over_layers(partial(saving_seconds, workload, tokens=tokens))
    whole, alone = (
        summed(head_parts(workload, tokens=tokens, with_gradients=is_whole))
        for is_whole in (True, False)
    )
    less[-1] += whole - alone
    return replace(costs, forward_s=costs.forward_s - less)


@lru_cache(maxsize=8)
def evaluation_program(candidate: Candidate) -> Schedule:
    """Return the forward-only program of a candidate whose schedule cuts no units; cached."""
    return forward_program(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        num_virtual=candidate.virtual_stages,
        lengths=candidate.sequence_lengths,
        streams_weights=candidate.state.streams_weights,
    )


def forward_memory(
    candidate: Candidate, *, training: Sequence[StageMemory]
) -> tuple[MemoryBuckets, ...]:
    """Return the memory of one device of each pipeline rank during a forward-only program.

    Args:
        candidate: Candidate of the sequences, which have equal cuts; its schedule cuts no units.
        training: Memory of each rank in a training step, with the state that stays.
    """
    candidate = _layout(candidate)
    element, on_cpu = candidate.workload.element_bytes, _on_cpu(candidate)
    running, sent = _running_bytes(candidate), _sent_bytes(candidate)
    # Sequences pass a stage one after another, each with its own K and V.
    keys, _, passing_keys = kv_of_sequences(candidate)
    states = states_of_units(candidate).max(axis=1)
    of_stages = candidate.by_rank((keys + passing_keys)[:, 0] + states)
    interleaves = candidate.schedule in ("interleaved_1f1b", "interleaved_seq1f1b")
    kv_bytes = of_stages.sum(axis=0) if interleaves else of_stages.max(axis=0)
    found = []
    for rank, held in enumerate(training):
        own = [*candidate.stages_of_rank(rank)]
        fullest = np.unravel_index((running + sent)[own].argmax(), running[own].shape)
        weights, gradients = (
            rank_parts(candidate, rank=rank, trained=trained) for trained in (False, True)
        )
        whole = round(gradients.room_elements) * ACCUMULATION_BYTES * (candidate.zero >= 2)
        kept = 0 if candidate.state.streams_gradients else held.device.gradients_bytes - whole
        gathered = weights.most_elements * element * on_cpu * (candidate.zero >= 3)
        found.append(
            replace(
                held.device,
                gradients_bytes=kept,
                kv_bytes=round(float(kv_bytes[rank])),
                kv_gradients_bytes=0,
                activations_bytes=0,
                loss_gradient_bytes=0,
                working_bytes=round(float(running[own][fullest])),
                communication_bytes=round(float(sent[own][fullest]) + gathered),
            )
        )
    return tuple(found)


def _layout(candidate: Candidate) -> Candidate:
    """Return a candidate as it evaluates: no K and V are kept that no later forward reads."""
    return replace(candidate, windowed_kv="recomputed")


def _on_cpu(candidate: Candidate) -> bool:
    return candidate.workload.hardware.device.kind == "cpu"


def _sent_bytes(candidate: Candidate) -> Table:
    """Return the bytes of messages and exchanges during the forward of each unit, [stages, N].

    On a CPU, messages are held until they are waited for, and counted along the program.
    """
    if not _on_cpu(candidate) or candidate.num_stages == 1:
        bound: Table = sent_bytes(candidate)[0]
        return bound
    workload, program = candidate.workload, evaluation_program(candidate)
    row_bytes = workload.hidden_row_bytes
    row_bytes //= workload.sequence_parallel_degree
    found = np.zeros((candidate.num_stages, len(candidate.lengths)))
    for rank, actions in enumerate(program.programs):
        held = tokens_held(program, rank=rank)
        for action in actions:
            if action.kind is ActionKind.F:
                place = action.stage, action.unit[1]
                found[place] = max(found[place], next(held)[0] * row_bytes)
    lengths = np.array(candidate.lengths, dtype=np.float64)
    total: Table = found + exchanged_bytes(candidate, lengths)
    return total


def _running_bytes(candidate: Candidate) -> Table:
    """Return the working set of the forward of each unit of a sequence, [stages, N]."""
    workload, degree = candidate.workload, candidate.workload.sequence_parallel_degree
    nothing: frozenset[int] = frozenset()
    found = np.zeros((candidate.num_stages, len(candidate.lengths)))
    here = -(-np.array(candidate.lengths) // degree)
    prefixes = same_prefixes(workload, tokens=here * degree, prefixes=np.array(candidate.prefixes))
    for part, (tokens, prefix) in enumerate(zip(here.tolist(), prefixes.tolist(), strict=True)):
        for stage in range(candidate.num_stages):
            found[stage, part], _ = running_bytes(
                candidate,
                tokens=tokens * degree,
                prefix=prefix,
                recomputed=nothing,
                retained=nothing,
                stage=stage,
                layers=0,
            )
        found[-1, part] = max(found[-1, part], loss_bytes(workload, tokens=tokens * degree))
    return found
