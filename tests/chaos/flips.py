"""Flipped bits: in gradients and weights of a rank, and in blocks on their way to the tier."""

from __future__ import annotations

from typing import Any

from tests.chaos.strike import Strike

_EFFECT = 1e-2
"""Least relative change of the norm of a rank's gradients by a flipped bit."""
_watched: list[Any] = []
"""Training state of this rank once its weights are watched; empty during an update of them."""


def watch_state() -> None:
    """Keep the training state of the ranks that this process starts."""
    from sppo.training.state import TrainingState
    from sppo.training.watch.corruption import Watch

    note, update = Watch.note_weights, TrainingState.update

    def noting(watch: Any) -> None:
        note(watch)
        _watched[:] = [watch._state]

    def updating(state: Any, *arguments: Any, **options: Any) -> None:
        _watched.clear()
        update(state, *arguments, **options)

    Watch.note_weights, TrainingState.update = noting, updating  # type: ignore[method-assign]


def weights_are_watched() -> bool:
    """Return whether the weights of this rank are what an update has left."""
    return bool(_watched)


def flip_weight(strike: Strike) -> None:
    """Flip any bit of any weight of this rank."""
    import torch

    (state,) = _watched
    row = strike.dice.choice([row for row in state.weights.values() if row.numel()])
    index, bit = strike.dice.randrange(row.numel()), strike.dice.randrange(31)
    row[index : index + 1].view(torch.int32).bitwise_xor_(1 << bit)


def flip_gradient(strike: Strike) -> None:
    """Flip a bit of what this rank updates with, of those that change its norm."""
    import torch

    state = strike.arguments[0]
    rows = [row.view(-1) for row in state.sharded.owned(state.gradients).values()]
    norm = float(torch.linalg.vector_norm(torch.cat(rows)))
    row = strike.dice.choice(rows)
    index = strike.dice.randrange(row.numel())
    element = row[index : index + 1].view(torch.int32)
    for bit in strike.dice.sample(range(31), 31):
        before = float(row[index])
        element.bitwise_xor_(1 << bit)
        effect = abs((1 + (float(row[index]) ** 2 - before**2) / norm**2) ** 0.5 - 1)
        if not effect <= _EFFECT:  # NaN, too
            return
        element.bitwise_xor_(1 << bit)
    raise AssertionError("no bit of the element matters")


def flip_block(strike: Strike) -> None:
    """Flip a bit of what goes to the disk, or of what came from there before."""
    piece = strike.arguments[1]
    piece[strike.dice.randrange(len(piece))] ^= 1 << strike.dice.randrange(8)
