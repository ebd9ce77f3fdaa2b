"""The order in which K and V that left the device come back to one rank.

They come back through the ring of the offload store, block by block, each into the buffers of
:class:`sppo.engine.kv_store.KVStore`. The program says in front of which backward a unit's blocks
may come. They are restored beside that backward: one before saved tensors are taken of each of its
layers but the first, the others behind it. A backward that reads them waits for all of them first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from sppo.activations.activation_layout import ActivationKey
from sppo.engine.stage import Stage
from sppo.schedule.actions import Action, ActionKind


class KVReturns:
    """Blocks of K and V that are on their way back, and when each is restored.

    Args:
        restore: called with the stage and the key of a block when it is its turn.
    """

    def __init__(self, restore: Callable[[int, ActivationKey], None]) -> None:
        self._restore = restore
        self._waiting: deque[tuple[int, ActivationKey]] = deque()

    def permit(self, stage: int, keys: Iterable[ActivationKey]) -> None:
        """Let the blocks of a unit come back from now on: its H2D of K and V."""
        self._waiting.extend((stage, key) for key in keys)

    def before(self, backward: Action) -> Callable[[], None] | None:
        """Restore what ``backward`` reads; return what to call between its layers, if anything."""
        reader = backward.stage, backward.sequence
        if any((stage, key.sequence) == reader for stage, key in self._waiting):
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
            self._restore(*self._waiting.popleft())


def take_order(program: Sequence[Action], stages: Mapping[int, Stage]) -> list[ActivationKey]:
    """Return all blocks that leave the device, in the order in which backward takes them.

    Args:
        program: of the rank; MSP shards have stores of their own and are left out.
        stages: of the rank.
    """
    order: list[ActivationKey] = []
    returns = KVReturns(lambda _, key: order.append(key))
    for action in program:
        stage = stages.get(action.stage)
        if stage is None or action.num_shards > 1:
            continue
        if action.kind is ActionKind.H2D and action.wire == "kv":
            returns.permit(action.stage, stage.kv_keys(action.unit))
        elif action.kind is ActionKind.B:
            between_layers = returns.before(action)
            for number, key in enumerate(stage.saved_keys(action.unit)):
                if number and between_layers is not None:
                    between_layers()
                order.append(key)
            returns.restore_all()
    return order
