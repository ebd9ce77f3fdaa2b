"""Placement of the reductions of gradients between the compute actions of a program."""

from __future__ import annotations

from collections.abc import Sequence

from sppo.schedule.actions import Action, ActionKind


def with_reductions(actions: Sequence[Action], *, stages: Sequence[int]) -> list[Action]:
    """Return `actions` of one rank with a REDUCE for each stage in `stages`.

    The REDUCE of a stage follows the last B or W of the stage. The REDUCE of the stage that ends
    last is at the end of the program, after shards of other ranks' stages: the rank waits there
    for all reductions in flight.
    """
    backward = (ActionKind.B, ActionKind.W)
    own = set(stages)
    last = {a.stage: n for n, a in enumerate(actions) if a.kind in backward and a.stage in own}
    if last:
        last[max(last, key=last.__getitem__)] = len(actions) - 1
    ended = {index: stage for stage, index in last.items()}
    placed: list[Action] = []
    for index, action in enumerate(actions):
        placed.append(action)
        if index in ended:
            placed.append(Action(ActionKind.REDUCE, ended[index]))
    return placed
