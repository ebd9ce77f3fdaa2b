"""Memory of the messages between stages that a rank holds while it runs its program.

As in :mod:`sppo.engine.stage_buffers` and :mod:`sppo.parallel.pipeline_p2p`: a receive allocates
its tensor when it is posted; a sent tensor is held until it has left, which gloo reports only if it
is waited for, so the last :data:`MOST_SENDS` messages to each receiver are held. An interval of
tokens that is sent, or that stays on the rank, is a view that holds the whole tensor.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from sppo.schedule.actions import Action, ActionKind, UnitKey, Wire
from sppo.schedule.msp_groups import Route
from sppo.schedule.schedule import Schedule

MOST_SENDS = 2
"""Most messages to one receiver that a rank holds, as in :mod:`sppo.parallel.pipeline_p2p`."""

_Input = tuple[Wire, int, UnitKey]
"""Wire, consuming stage and unit of the input of a stage."""


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
