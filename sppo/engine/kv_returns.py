"""Order in which offloaded K and V return to the device of one rank.

Blocks of K and V pass through the ring of the offload store, one by one, into the buffers of
:class:`sppo.engine.attention.kv_store.KVStore`. The program's H2D of a unit's K and V says before
which backward its blocks may return. They are restored during that backward: one block before the
saved tensors of each layer except the first are taken, the rest after the backward. A backward that
itself reads the K and V of waiting blocks restores all blocks first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from sppo.activations.activation_layout import ActivationKey
from sppo.engine.stage import Stage
from sppo.schedule.actions import Action, ActionKind


class KVReturns:
    """Queue of offloaded blocks of K and V that may return and are not restored yet.

    Args:
        restore: Called with the stage and the key of each block to restore, in order.
    """

    def __init__(self, restore: Callable[[int, ActivationKey], None]) -> None:
        self._restore = restore
        self._waiting: deque[tuple[int, ActivationKey]] = deque()

    def permit(self, stage: int, keys: Iterable[ActivationKey]) -> None:
        """Queue the blocks of a unit, on its H2D of K and V."""
        self._waiting.extend((stage, key) for key in keys)

    def before(self, backward: Action) -> Callable[[], None] | None:
        """Restore the blocks that ``backward`` reads.

        Returns:
            Function to call between the layers of ``backward``; None if no block is queued.
        """
        reader = backward.stage, backward.sequence
        if any((stage, key.sequence) == reader for stage, key in self._waiting):
            self.restore_all()
        return self._restore_next if self._waiting else None

    def restore_all(self) -> None:
        """Restore all queued blocks."""
        while self._waiting:
            self._restore_next()

    def abort(self) -> None:
        """Drop all queued blocks of a failed step."""
        self._waiting.clear()

    def _restore_next(self) -> None:
        if self._waiting:
            self._restore(*self._waiting.popleft())


def take_order(program: Sequence[Action], stages: Mapping[int, Stage]) -> list[ActivationKey]:
    """Return the keys of all offloaded blocks, in the order in which backward takes them.

    Args:
        program: Program of the rank; MSP shards are skipped, because their stores are separate.
        stages: Stages of the rank, by stage index.
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
