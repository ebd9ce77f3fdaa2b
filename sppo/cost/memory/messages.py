"""Memory of messages: received, sent, exchanged and waiting tensors.

:func:`sent_bytes` bounds them from the unit that runs. All units of a group
(:func:`sppo.schedule.orders.rank_orders.sequence_groups`) pass one stage of a rank before the first
of them enters the rank's next stage. While a unit runs forward, inputs of later units have arrived,
and outputs of earlier units have come back from the last rank; all wait on the rank of the first
stage. Gradients wait in the same way on the rank of the last stage.

:func:`tokens_held` counts the messages of a program. As in :mod:`sppo.engine.stage_buffers` and
:mod:`sppo.parallel.pipeline_p2p`, a receive allocates its tensor when it is posted; a sent tensor
is held until it has left, which gloo reports only if it is waited for, so the last
:data:`MOST_SENDS` messages to each receiver are held. An interval of tokens that is sent, or that
stays on the rank, is a view that holds the whole tensor.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.schedule.actions import Action, ActionKind, UnitKey, Wire
from sppo.schedule.costs import Table
from sppo.schedule.msp_groups import Route
from sppo.schedule.orders.names import LOOPED
from sppo.schedule.orders.rank_orders import sequence_groups
from sppo.schedule.schedule import Schedule

MOST_SENDS = 2
"""Most messages to one receiver that a rank holds until they are sent."""

_Input = tuple[Wire, int, UnitKey]
"""Wire, consuming stage and unit of the input of a stage."""


def sent_bytes(candidate: Candidate) -> Table:
    """Return the bytes of messages, exchanges and waiting units while each unit runs.

    Messages go to and from neighbouring stages, exchanges stay in the sequence-parallel group, and
    units wait on a rank between two of its stages.

    Returns:
        Bytes during the forward, and during the backward of each unit, [2, stages, N].
    """
    workload = candidate.workload
    lengths = np.array(candidate.lengths, dtype=np.float64)
    row_bytes = 2 * workload.hidden_row_bytes  # one message each way
    sent = lengths // workload.sequence_parallel_degree * row_bytes
    of_units = candidate.neighbours[:, None] * sent + exchanged_bytes(candidate, lengths)
    return of_units + _waiting_bytes(candidate)


def exchanged_bytes(candidate: Candidate, lengths: Table) -> Table:
    """Return the bytes of tensors that a sequence-parallel group exchanges for units of `lengths`.

    Ulysses holds q, k, v and o twice, or the inputs and outputs of linear attention. Megatron holds
    tensors of all tokens where the working set counts only the device's own, most in the backward
    of the MLP: both normed inputs, gathered again, this rank's part of their gradient, and all
    ranks' parts for its own tokens.
    """
    workload = candidate.workload
    model, degree = workload.model, workload.sequence_parallel_degree
    if degree == 1:
        return np.zeros(len(lengths))
    if workload.sequence_parallel == "megatron":
        gathered: Table = 4 * lengths * workload.hidden_row_bytes
        return gathered
    heads = 2 * (2 * model.num_heads + 2 * model.kv_heads) * model.head_dim
    if model.linear_attention is not None:
        linear = model.linear_attention
        heads = max(heads, 2 * (linear.inputs_width + linear.values_width))
    exchanged: Table = (lengths // degree) * workload.element_bytes * heads
    return exchanged


def _waiting_bytes(candidate: Candidate) -> Table:
    """Return upper bounds of the bytes that wait during a unit's F, and its B, [2, stages, N].

    They assume that all units have arrived, which in a run depends on time. In the looped order no
    activation waits during backwards, and no gradient during forwards; in other orders both may.
    Waiting gradients of the looped order are not counted: each takes the place of its unit's
    gradient of the loss, which has a bucket. On a single pipeline rank, waiting activations are not
    counted either: their units have no gradient of the loss yet, and its bucket has room.
    """
    ranks, workload = candidate.pipeline_parallel_degree, candidate.workload
    found: Table = np.zeros((2, candidate.num_stages, len(candidate.lengths)))
    is_looped = candidate.order == LOOPED
    if candidate.virtual_stages == 1 or (is_looped and ranks == 1):
        return found
    row_bytes = workload.hidden_row_bytes
    waiting = _waiting_tokens(candidate) * (row_bytes / workload.sequence_parallel_degree)
    if is_looped:
        found[0, ::ranks] = waiting
        return found
    for rank in (0, ranks - 1):
        found[:, rank::ranks] += waiting.max()
    return found


def _waiting_tokens(candidate: Candidate) -> Table:
    """Return the tokens that wait while a unit runs on each stage of a rank, [virtual stages, N].

    Nothing waits before the first stage or after the last. If sequences are cut alike, the sequence
    of a group with the most waiting tokens counts; packed sequences count one by one.
    """
    of_sequences = candidate.sequence_lengths
    lengths = np.array([length for own in of_sequences for length in own], dtype=np.float64)
    ends = np.cumsum([len(own) for own in of_sequences])
    tokens = np.zeros((candidate.virtual_stages, len(lengths)))
    for group in sequence_groups(of_sequences, num_ranks=candidate.pipeline_parallel_degree):
        own = slice(int(ends[group.start - 1]) if group.start else 0, int(ends[group.stop - 1]))
        up_to = np.cumsum(lengths[own])
        tokens[:, own] = up_to[-1] - lengths[own]
        tokens[0, own] = up_to - lengths[own]
        tokens[-1, own] = up_to[-1] - up_to
    if candidate.packed:
        return tokens
    most: Table = tokens.reshape(len(tokens), len(of_sequences), -1).max(axis=1)
    return most


class _Tensor:
    """Tensor of some tokens, with the number of its intervals that are held."""

    __slots__ = ("holders", "tokens")

    def __init__(self, tokens: int, *, holders: int = 1) -> None:
        self.tokens, self.holders = tokens, holders


def tokens_held(schedule: Schedule, *, rank: int) -> Iterator[tuple[int, int]]:
    """Yield the tokens of messages that a rank holds during each of its F and B, in order.

    An action joins the intervals of its input, if there are several. The input of a forward becomes
    a saved tensor or part of the working set, and is not counted, unless it is a view: then the
    rest of the whole tensor counts. The input of a backward counts until the action ends.

    Args:
        schedule: Program of a step, with messages.
        rank: Pipeline rank.

    Yields:
        Tokens of all tensors, and of those that become free as soon as the action has read its
        input.
    """
    held = 0
    inputs: dict[_Input, list[_Tensor]] = defaultdict(list)
    outgoing: dict[tuple[_Input, int], _Tensor] = {}
    sent: dict[int, deque[_Tensor]] = defaultdict(deque)
    for action in schedule.programs[rank]:
        is_forward = action.kind is ActionKind.F
        if action.kind is ActionKind.SEND:
            key = _result(action, is_act=action.wire == "act")
            under_way = sent[_routes(schedule, key)[action.shard].receiver]
            if len(under_way) == MOST_SENDS:
                held -= _dropped([under_way.popleft()])
            under_way.append(outgoing.pop((key, action.shard)))
        elif action.kind is ActionKind.RECV:
            assert action.wire is not None, "a message carries something"
            key = action.wire, action.stage, action.unit
            route = _routes(schedule, key)[action.shard]
            inputs[key].append(_Tensor(route.end - route.begin))
            held += route.end - route.begin
        elif is_forward or action.kind is ActionKind.B:
            key = "act" if is_forward else "grad", action.stage, action.unit
            taken = inputs.pop(key, [])
            own = [route for route in _routes(schedule, key) if route.receiver == rank]
            tokens = sum(route.end - route.begin for route in own)
            if len(taken) > 1:
                held += tokens - _dropped(taken)
                taken = [_Tensor(tokens)]
            elsewhere = tokens * is_forward * len(taken)
            freed = sum(tensor.tokens for tensor in taken if tensor.holders == 1)
            yield held - elsewhere, freed
            held -= _dropped(taken)
            key = _result(action, is_act=is_forward)
            routes = [(n, r) for n, r in enumerate(_routes(schedule, key)) if r.sender == rank]
            tensor = _Tensor(sum(r.end - r.begin for _, r in routes), holders=len(routes))
            held += tensor.tokens
            for number, route in routes:
                if route.receiver == rank:
                    inputs[key].append(tensor)
                else:
                    outgoing[key, number] = tensor


def _dropped(tensors: Iterable[_Tensor]) -> int:
    """Drop an interval of each tensor; return the tokens of those that nothing holds any more."""
    freed = 0
    for tensor in tensors:
        tensor.holders -= 1
        freed += 0 if tensor.holders else tensor.tokens
    return freed


def _result(action: Action, *, is_act: bool) -> _Input:
    """Return the input of another stage that an action makes or sends."""
    return (
        ("act", action.stage + 1, action.unit)
        if is_act
        else ("grad", action.stage - 1, action.unit)
    )


def _routes(schedule: Schedule, key: _Input) -> tuple[Route, ...]:
    """Return the routes of an input; () at the ends of the model."""
    wire, consumer, unit = key
    producer = consumer - (1 if wire == "act" else -1)
    return schedule.routes(wire, producer=producer, unit=unit)
