"""Memory of a step, counted action by action along its program, by nothing that plans it."""

from collections import defaultdict

import numpy as np

from sppo.cost.memory.stage_memory import kv_tokens
from sppo.cost.memory.unit_messages import sent_bytes
from sppo.cost.memory.unit_working_sets import computing_bytes
from sppo.cost.memory.units_in_flight import Running
from sppo.cost.stage_cost import placed_bytes, weight_operand_bytes
from sppo.schedule.actions import ActionKind
from sppo.schedule.generators import generate

_COMPUTE = (ActionKind.F, ActionKind.B, ActionKind.W)


def schedule_of(candidate):
    """The program of a candidate with packed sequences, by its schedule's generator."""
    return generate(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        num_virtual=candidate.virtual_stages,
        lengths=candidate.sequence_lengths,
        pipelines=candidate.pipelines,
    )


def walked_peaks(candidate, held, running, schedule=None):
    """Most bytes that each rank holds of units, K and V, their gradients and operands.

    Args:
        candidate: with packed sequences.
        held: bytes of a unit from its forward to the end of its backward, [stages, units].
        running: bytes of a unit's forward and of its backward while they run.
        schedule: program of the candidate; None generates it.
    """
    schedule = schedule or schedule_of(candidate)
    return [
        max(_bytes_at_actions(candidate, program, held, running)) for program in schedule.programs
    ]


def _bytes_at_actions(candidate, program, held, running):
    """What one rank holds while each of its forwards, backwards and weight halves runs."""
    firsts = [own.start for own in candidate.distinct_sequences]
    tokens = [sequence.tokens for sequence in candidate.packed]
    kv, operands = kv_tokens(candidate), weight_operand_bytes(candidate)
    actions = [action for action in program if action.kind in _COMPUTE]
    deferred = {_key(action) for action in actions if action.kind is ActionKind.W}
    left = defaultdict(int)
    for action in actions:
        left[action.stage, action.sequence] += 1
    units, waiting, keys, gradients = {}, {}, {}, {}
    for action in actions:
        unit = action.stage, firsts[action.sequence] + action.subsequence
        owner = action.stage, action.sequence
        beside = 0.0
        if action.kind is ActionKind.F:
            units[unit] = held[unit]
            keys[owner] = kv.kv[action.stage] * tokens[action.sequence]
            beside = running.forward[unit]
        elif action.kind is ActionKind.B:
            gradients[owner] = kv.gradients[action.stage] * tokens[action.sequence]
            beside = running.backward[unit]
        yield sum(map(_total, (units, waiting, keys, gradients))) + beside
        left[owner] -= 1
        if action.kind is ActionKind.B:
            del units[unit]
            if _key(action) in deferred:
                waiting[unit] = operands[unit]
        elif action.kind is ActionKind.W:
            del waiting[unit]
        if not left[owner]:
            keys.pop(owner), gradients.pop(owner, None)


def _key(action):
    return action.stage, action.sequence, action.subsequence


def _total(held):
    return float(np.sum([*held.values()]))


def walked_device_bytes(evaluated, schedule=None):
    """Most that each rank's device holds under a placement, weights and the like included.

    Args:
        evaluated: a candidate with packed sequences and a placement.
        schedule: program of the candidate; None generates it.
    """
    candidate, placement = evaluated.candidate, evaluated.placement
    held = placed_bytes(placement.retained, recomputed=placement.recomputed, candidate=candidate)
    computing, sent = computing_bytes(candidate, placement), sent_bytes(candidate)
    both = Running(computing.forward + sent.forward, computing.backward + sent.backward)
    peaks = walked_peaks(candidate, held, both, schedule)
    return [
        peak + _steady_bytes(rank.device)
        for peak, rank in zip(peaks, evaluated.memory, strict=True)
    ]


_STEADY = (
    "weights_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "copies_bytes",
    "loss_gradient_bytes",
    "heap_bytes",
    "growth_bytes",
)
"""Buckets that are there all the time."""


def _steady_bytes(device):
    """Bytes of these buckets."""
    return sum(getattr(device, name) for name in _STEADY)
