"""Memory of the messages between stages that a rank holds while it runs its program.

As in :mod:`sppo.engine.stage_buffers` and :mod:`sppo.parallel.pipeline_p2p`: a receive allocates
its tensor when it is posted; a sent tensor is held until it has left, which gloo reports only if it
is waited for, so the last :data:`MOST_SENDS` messages to each receiver are held. An interval of
tokens that is sent, or that stays on the rank, is a view that holds the whole tensor.
"""

from __future__ import annotations

from collections import deque

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


class MessagesHeld:
    """Tokens of the messages that one rank holds, action by action.

    Args:
        schedule: Program of a step, with messages.
        rank: Pipeline rank.
    """

    def __init__(self, schedule: Schedule, *, rank: int) -> None:
        self._schedule, self._rank = schedule, rank
        self._inputs: dict[_Input, list[_Tensor]] = {}
        self._outgoing: dict[tuple[_Input, int], _Tensor] = {}
        self._sent: dict[int, deque[_Tensor]] = {}
        self._taken: _Tensor | None = None
        self._counted_elsewhere = 0
        self.tokens = 0
        """Tokens of all tensors held."""

    def send(self, action: Action) -> None:
        """Count a SEND: the oldest message to the receiver is forgotten if there are too many."""
        assert action.wire is not None, "a message carries something"
        step = 1 if action.wire == "act" else -1
        key: _Input = (action.wire, action.stage + step, action.unit)
        tensor = self._outgoing.pop((key, action.shard))
        sent = self._sent.setdefault(self._routes_of(key)[action.shard].receiver, deque())
        while len(sent) >= MOST_SENDS:
            self._drop(sent.popleft())
        sent.append(tensor)

    def receive(self, action: Action) -> None:
        """Count a RECV, which allocates the tensor."""
        assert action.wire is not None, "a message carries something"
        key: _Input = (action.wire, action.stage, action.unit)
        route = self._routes_of(key)[action.shard]
        tensor = _Tensor(route.end - route.begin)
        self._inputs.setdefault(key, []).append(tensor)
        self.tokens += tensor.tokens

    def begin(self, action: Action) -> None:
        """Begin an F or B, which takes its input; intervals that are joined are freed.

        The input of a forward becomes a saved tensor or part of the working set, and is not counted
        any more, unless it is a view: then the rest of the whole tensor counts. The input of a
        backward counts until the action ends.
        """
        is_forward = action.kind is ActionKind.F
        key: _Input = ("act" if is_forward else "grad", action.stage, action.unit)
        tensors = self._inputs.pop(key, [])
        if not tensors:
            return
        tokens = sum(r.end - r.begin for r in self._routes_of(key) if r.receiver == self._rank)
        if len(tensors) > 1:
            for tensor in tensors:
                self._drop(tensor)
            tensors = [_Tensor(tokens)]
            self.tokens += tokens
        (taken,) = tensors
        self._taken, self._counted_elsewhere = taken, tokens * is_forward
        self.tokens -= self._counted_elsewhere

    @property
    def freed_tokens(self) -> int:
        """Tokens that become free as soon as nothing reads the input of the running action."""
        taken = self._taken
        if taken is None or taken.holders > 1:
            return 0
        return taken.tokens - self._counted_elsewhere

    def end(self, action: Action, *, tokens: int) -> None:
        """End an F or B: free its input, and hold its output for the stages that read it.

        Args:
            action: Action that ends.
            tokens: Tokens of its output.
        """
        if self._taken is not None:
            self.tokens += self._counted_elsewhere
            self._drop(self._taken)
            self._taken = None
        is_forward = action.kind is ActionKind.F
        consumer = action.stage + (1 if is_forward else -1)
        key: _Input = ("act" if is_forward else "grad", consumer, action.unit)
        own = [(n, r) for n, r in enumerate(self._routes_of(key)) if r.sender == self._rank]
        if not own:
            return
        tensor = _Tensor(tokens, holders=len(own))
        self.tokens += tokens
        for number, route in own:
            if route.receiver == self._rank:
                self._inputs.setdefault(key, []).append(tensor)
            else:
                self._outgoing[key, number] = tensor

    def _drop(self, tensor: _Tensor) -> None:
        tensor.holders -= 1
        if not tensor.holders:
            self.tokens -= tensor.tokens

    def _routes_of(self, key: _Input) -> tuple[Route, ...]:
        """Return the routes of an input; () at the ends of the model."""
        wire, consumer, unit = key
        producer = consumer - (1 if wire == "act" else -1)
        return self._schedule.routes(wire, producer=producer, unit=unit)
