"""K and V on their way back to one rank, and when they are restored.

K and V that left the device come back through the ring of the offload store, block by block, each
into the buffers of :class:`sppo.engine.kv_store.KVStore`. The program says in front of which
backward a unit's blocks may come. They are restored beside that backward: one before saved tensors
are taken of each of its layers but the first, the others behind it. A backward that reads them
waits for all of them first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from sppo.activations.activation_layout import ActivationKey
from sppo.engine.stage import Stage
from sppo.engine.unit import Unit
from sppo.schedule.actions import Action, ActionKind
from sppo.schedule.orders import UnitKey


class KVReturns:
    """Restores K and V of the stages of one rank.

    Args:
        stages: of the rank, by index.
    """

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        self._waiting: deque[tuple[int, ActivationKey]] = deque()
        self._units: Mapping[UnitKey, Unit] = {}

    def begin(self, units: Mapping[UnitKey, Unit]) -> None:
        """Start a step with these units."""
        self._units = units

    def permit(self, action: Action) -> None:
        """Run an H2D of K and V: its blocks may come back from now on."""
        stage = self._stages[action.stage]
        assert stage.offloaded is not None, f"{action} on a stage without another tier"
        keys = stage.kv_keys(action.unit)
        stage.offloaded.start_reload(keys)
        self._waiting.extend((action.stage, key) for key in keys)

    def before(self, backward: Action) -> Callable[[], None] | None:
        """Restore what ``backward`` reads; return what to call between its layers, if anything."""
        if _reads(backward, self._waiting):
            self.restore_all()
        return self._restore_next if self._waiting else None

    def restore_all(self) -> None:
        """Restore everything that is on its way."""
        while self._waiting:
            self._restore_next()

    def abort(self) -> None:
        """Forget a step that failed."""
        self._waiting.clear()

    def _restore_next(self) -> None:
        if self._waiting:
            index, key = self._waiting.popleft()
            self._stages[index].restore_kv(key, self._units[key.sequence, key.subsequence].span)


def take_order(program: Sequence[Action], stages: Mapping[int, Stage]) -> list[ActivationKey]:
    """Return all blocks that leave the device, in the order in which backward takes them.

    Args:
        program: of the rank; MSP shards have stores of their own and are left out.
        stages: of the rank.
    """
    order: list[ActivationKey] = []
    waiting: deque[tuple[int, ActivationKey]] = deque()

    def take_waiting(most: int) -> None:
        order.extend(waiting.popleft()[1] for _ in range(min(most, len(waiting))))

    for action in program:
        if action.num_shards > 1:
            continue
        stage = stages.get(action.stage)
        if stage is None:
            continue
        if action.kind is ActionKind.H2D and action.wire == "kv":
            waiting.extend((action.stage, key) for key in stage.kv_keys(action.unit))
        elif action.kind is ActionKind.B:
            if _reads(action, waiting):
                take_waiting(len(waiting))
            first, *others = stage.saved_keys(action.unit)
            order.append(first)
            for key in others:
                take_waiting(1)
                order.append(key)
            take_waiting(len(waiting))
    return order


def _reads(backward: Action, waiting: deque[tuple[int, ActivationKey]]) -> bool:
    """Whether a backward attends to K and V that are among ``waiting``."""
    return any(
        index == backward.stage and key.sequence == backward.sequence for index, key in waiting
    )
