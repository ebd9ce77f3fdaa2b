"""Buffers of activations and gradients between the stage that makes and the stage that uses them.

Between two stages a unit is whole, or cut into intervals of tokens by multiplexed sequence
partitioning. Each interval has a route from the rank that ran its shard on the producing stage to
the rank that runs its shard on the consuming stage (:mod:`sppo.schedule.msp_groups`). Intervals
whose route stays on this rank are passed on in memory; the others are messages. Every tensor is put
once and taken once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sppo.parallel.pipeline_p2p import MessageInFlight, PipelineLinks
from sppo.schedule.actions import Action, ActionKind, UnitKey, Wire
from sppo.schedule.msp_groups import Route
from sppo.schedule.schedule import Schedule

LocalTokens = Callable[[UnitKey, int], int]
"""Maps (unit, end) to the number of the unit's first ``end`` tokens that this rank holds."""


_TO_CONSUMER: dict[Wire, int] = {"act": 1, "grad": -1}
"""Steps from the stage that makes a tensor to the stage that uses it."""


class _InputKey(NamedTuple):
    """Key of one input of a stage: activation ("act") or gradient ("grad") of one unit."""

    wire: Wire
    consumer: int
    unit: UnitKey


class StageBuffers:
    """Tensors of a step that wait on one rank between stages.

    Args:
        schedule: Schedule of the step.
        rank: Pipeline rank of this process.
        p2p: Pipeline communication; None if the program has no messages.
        local: Function that counts this rank's tokens of each unit.
        message: Elements per token and dtype of messages.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        rank: int,
        p2p: PipelineLinks | None,
        local: LocalTokens,
        message: tuple[int, torch.dtype],
    ) -> None:
        self._schedule, self._rank, self._p2p, self._local = schedule, rank, p2p, local
        self._width, self._dtype = message
        self.has_links = p2p is not None
        """True if the rank exchanges messages with others."""
        self._here: dict[_InputKey, dict[int, Tensor]] = {}
        self._expected: dict[_InputKey, dict[int, MessageInFlight]] = {}
        self._outgoing: dict[tuple[Wire, int, UnitKey, int], tuple[Tensor, int]] = {}
        """Messages and their receivers, by the (wire, stage, unit, number) of their SEND."""

    def put(self, wire: Wire, action: Action, tensor: Tensor, *, first: int = 0) -> None:
        """Store the output of an F (wire "act") or B (wire "grad").

        Args:
            wire: Kind of tensor.
            action: Action that made the tensor.
            tensor: Output, with the tokens of this rank, or of its shard of the unit.
            first: Index of the first token of ``tensor`` among this rank's tokens of the unit.
        """
        stage, unit, end = action.stage, action.unit, first + tensor.shape[0]
        for number, route in enumerate(self._schedule.routes(wire, producer=stage, unit=unit)):
            if route.sender != self._rank:
                continue
            begin, stop = self._interval(unit, route)
            assert first <= begin <= stop <= end, f"{action} made tokens {first} to {end}"
            part = tensor[begin - first : stop - first]
            if route.receiver == self._rank:
                key = _InputKey(wire, stage + _TO_CONSUMER[wire], unit)
                self._here.setdefault(key, {})[begin] = part
            else:
                self._outgoing[wire, stage, unit, number] = part, route.receiver

    def send(self, action: Action) -> None:
        """Run a SEND; the stage of ``action`` is the producer of the tensor."""
        assert self._p2p is not None, "a program with messages has links between ranks"
        assert action.wire is not None, "a message carries something"
        key = action.wire, action.stage, action.unit, action.shard
        part, receiver = self._outgoing.pop(key)
        if part.shape[0]:
            self._p2p.send(part, receiver=receiver, what=str(action))

    def receive(self, action: Action) -> None:
        """Post the receive of a RECV; the stage of ``action`` is the consumer of the tensor."""
        assert self._p2p is not None, "a program with messages has links between ranks"
        assert action.wire is not None, "a message carries something"
        producer = action.stage - _TO_CONSUMER[action.wire]
        routes = self._schedule.routes(action.wire, producer=producer, unit=action.unit)
        route = routes[action.shard]
        begin, end = self._interval(action.unit, route)
        if end > begin:
            key = _InputKey(action.wire, action.stage, action.unit)
            self._expected.setdefault(key, {})[begin] = self._p2p.receive(
                (end - begin, self._width),
                dtype=self._dtype,
                sender=route.sender,
                what=f"{action} from pipeline rank {route.sender}",
            )

    def await_input(self, action: Action) -> None:
        """Wait until all messages with the input of an F or B have arrived."""
        key = _input_of(action)
        for begin, arrival in self._expected.pop(key, {}).items():
            self._here.setdefault(key, {})[begin] = arrival.wait()

    def take(self, action: Action) -> Tensor | None:
        """Return the input of an F or B, made by the neighbouring stage; None if there is none."""
        parts = self._here.pop(_input_of(action), None)
        if parts is None:
            return None
        ordered = [parts[begin] for begin in sorted(parts)]
        return ordered[0] if len(ordered) == 1 else torch.cat(ordered)

    def wait_all(self) -> None:
        """Wait until all messages have been sent, at the end of a step.

        Raises:
            AssertionError: A tensor was stored or received, but not taken or sent.
        """
        if self._p2p is not None:
            self._p2p.wait_all()
        left = [f"{p.wire} of unit {p.unit} for stage {p.consumer}" for p in self._here]
        left += [f"a message: {key}" for key in self._expected]
        left += [f"not sent: {key}" for key in self._outgoing]
        assert not left, f"left over after the step: {', '.join(left)}"

    def _interval(self, unit: UnitKey, route: Route) -> tuple[int, int]:
        """Return the interval of a route's tokens, as indices into this rank's tokens."""
        return self._local(unit, route.begin), self._local(unit, route.end)


def _input_of(action: Action) -> _InputKey:
    wire: Wire = "act" if action.kind is ActionKind.F else "grad"
    return _InputKey(wire, action.stage, action.unit)
