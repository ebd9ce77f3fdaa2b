"""Costs of evaluating sequences with the layout of a training step: forwards alone.

Weights, gradients and optimizer states stay where training has them. Nothing is saved for backward:
K and V of a sequence leave a stage with the stage's last subsequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_tokens
from sppo.cost.layer import head_parts, saving_seconds, summed
from sppo.cost.live_sets.working_set import working_sets
from sppo.cost.memory.messages import exchanged_bytes, tokens_held
from sppo.cost.memory.stage_memory import MemoryBuckets, StageMemory
from sppo.cost.memory.unit_working_sets import loss_bytes
from sppo.cost.sharding.weight_parts import rank_parts
from sppo.cost.stage_cost import costs_without_activations
from sppo.schedule.actions import ActionKind
from sppo.schedule.costs import Costs, Table
from sppo.schedule.schedule import Schedule


def forward_costs(candidate: Candidate) -> Costs:
    """Return the costs of the forwards of a candidate's sequences if nothing is saved."""
    workload, costs = candidate.workload, costs_without_activations(candidate)
    tokens = np.array(candidate.lengths * candidate.sequences, dtype=np.float64)
    less = candidate.layer_counts[:, None] * saving_seconds(workload, tokens=tokens)
    whole, alone = (
        summed(head_parts(workload, tokens=tokens, with_gradients=is_whole))
        for is_whole in (True, False)
    )
    less[-1] += whole - alone
    return replace(costs, forward_s=costs.forward_s - less)


def forward_memory(
    candidate: Candidate, program: Schedule, *, training: Sequence[StageMemory]
) -> tuple[MemoryBuckets, ...]:
    """Return the memory of one device of each pipeline rank during a forward-only program.

    Args:
        candidate: Candidate of the sequences, which have equal cuts.
        program: Forward-only program of its sequences, with messages.
        training: Memory of each rank in a training step, with the state that stays.
    """
    on_cpu = candidate.workload.hardware.device.kind == "cpu"
    element, found = candidate.workload.element_bytes, []
    running, kv_bytes = _running_bytes(candidate), kv_tokens(candidate)[0]
    row_bytes = candidate.workload.model.hidden_size * element
    row_bytes //= candidate.workload.sequence_parallel_degree
    exchanged = exchanged_bytes(candidate, np.array(candidate.lengths, dtype=np.float64))
    last = len(candidate.lengths) - 1
    for rank, held in enumerate(training):
        messages = tokens_held(program, rank=rank)
        kv = most_kv = most_running = most_sent = 0.0
        for action in program.programs[rank]:
            if action.kind is not ActionKind.F:
                continue
            _, part = action.unit
            size = kv_bytes[action.stage] * sum(candidate.lengths)
            kv += size * (part == 0)
            most_kv = max(most_kv, kv)
            kv -= size * (part == last)
            sent = next(messages)[0] * row_bytes + exchanged[part]
            if running[action.stage, part] + sent > most_running + most_sent:
                most_running, most_sent = running[action.stage, part], sent
        parts = rank_parts(candidate, rank=rank)
        whole = round(parts.room_elements) * 4 * (candidate.zero >= 2)
        kept = 0 if candidate.state.streams_gradients else held.device.gradients_bytes - whole
        gathered = parts.most_elements * element * on_cpu * (candidate.zero >= 3)
        found.append(
            replace(
                held.device,
                gradients_bytes=kept,
                kv_bytes=round(most_kv),
                kv_gradients_bytes=0,
                activations_bytes=0,
                loss_gradient_bytes=0,
                working_bytes=round(most_running),
                communication_bytes=round(most_sent + gathered),
            )
        )
    return tuple(found)


def _running_bytes(candidate: Candidate) -> Table:
    """Return the working set of the forward of each unit of a sequence, [stages, N]."""
    workload, degree = candidate.workload, candidate.workload.sequence_parallel_degree
    nothing = frozenset((ATTENTION, LINEAR))
    of_layers, of_loss = np.zeros((2, len(candidate.lengths)))
    for part, (tokens, prefix) in enumerate(
        zip(candidate.lengths, candidate.prefixes, strict=True)
    ):
        here = -(-tokens // degree)
        (_, of_layers[part]), _ = working_sets(
            workload, tokens=here, prefix=prefix, recomputed=nothing, layers=1
        )
        of_loss[part] = loss_bytes(workload, tokens=tokens)
    found: Table = np.tile(of_layers, (candidate.num_stages, 1))
    found[-1] = np.maximum(of_layers, of_loss)
    return found
