"""Watch for values that a device computed or kept wrong without any error (silent corruption).

Weights change only in updates, so the sum of their bits after an update is the same before the
next: any flipped bit shows. Gradients are judged by the loss, the norm, what this rank adds to it,
and the largest element of each tensor. A step in which one stands out
(:mod:`sppo.training.watch.usual`) is computed again from the same inputs. The same loss and norm
mean that the data is unusual; others that a device computed wrong.

Not seen are wrong optimizer states, wrong weights in host memory or on disk, and wrong gradients
that leave all figures as usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from sppo.optim.gradient_norm import second_largest
from sppo.parallel.job.peer_errors import PeerLostError
from sppo.training.interruption import CorruptionError
from sppo.training.job import Job
from sppo.training.state import TrainingState
from sppo.training.watch.computed import Computed
from sppo.training.watch.nonfinite import first_of
from sppo.training.watch.usual import EFFECT, ElementShares, UsualFigure, is_alone


@dataclass(frozen=True, slots=True)
class _Figures:
    """Figures of one computation of a step."""

    loss: float
    norm: float
    """Norm of the gradients of all ranks."""
    largest: Mapping[str, float]
    """Largest magnitude in each gradient that this rank updates."""
    added: Mapping[str, float]
    """Norms of what this rank added to gradients, before any reduction, by key of the row."""

    @property
    def is_finite(self) -> bool:
        """True if loss and norm are neither NaN nor infinite."""
        return math.isfinite(self.loss + self.norm)

    @property
    def shares(self) -> dict[str, float]:
        """Share of the largest element of each gradient in the norm; none if the norm is 0."""
        # Squares of tiny elements may be 0.
        return {name: most / self.norm for name, most in self.largest.items() if self.norm}

    @property
    def watched(self) -> dict[str, float]:
        """Figures that have a usual range, by name."""
        part = math.hypot(*self.added.values()) / self.norm
        return {"loss": self.loss, "gradient norm": self.norm, "a rank's part of the norm": part}


class Watch:
    """Watches the weights and the steps of one run on this rank.

    Args:
        job: Job that trains the run.
        state: Training state of this rank, as the first step finds it.
        say: Function that prints a line on rank 0.
    """

    def __init__(self, job: Job, state: TrainingState, *, say: Callable[[str], None]) -> None:
        self._job, self._peers, self._state, self._say = job, job.peers, state, say
        # Equal inputs give equal bits on a CPU; some kernels of GPUs add in any order.
        self._tolerance = 0.0 if job.device.kind == "cpu" else EFFECT / 2
        self._usual: dict[str, UsualFigure] = {}
        self._elements = ElementShares()
        elsewhere = state.sharded.streamed_keys(state.tiers)
        rows = {key: row for key, row in state.weights.items() if key not in elsewhere}
        self._kept = {**rows, **state.choice_biases}
        self.note_weights()

    # Weights

    def note_weights(self) -> None:
        """Note the bits of the weights, which an update or a checkpoint has just written."""
        self._sums = sums_of_bits(self._kept.values())

    def check_weights(self, step: int) -> None:
        """Check that the weights are what the last update wrote.

        Ranks do not agree on it: the others would go on using the weights meanwhile.

        Args:
            step: Number of the step whose update, or whose save, comes next.

        Raises:
            CorruptionError: Some weight of this rank is not.
        """
        equal = (sums_of_bits(self._kept.values()) == self._sums).tolist()
        changed = [key for key, is_equal in zip(self._kept, equal, strict=True) if not is_equal]
        if changed:
            what = f"step {step}: weights changed without an update"
            self._blame({self._peers.rank: changed}, what)

    # Steps

    def confirmed(self, step: int, compute: Callable[[], Computed]) -> Computed:
        """Compute a step, and once more if a figure of it stands out. Collective.

        Args:
            step: Number of the step, counted from 1.
            compute: Function that computes it from the same inputs at each call.

        Returns:
            The last computation.

        Raises:
            CorruptionError: This rank computed other figures again.
            PeerLostError: Another rank did.
        """
        computed = compute()
        found, why = self._figures(computed), []
        if computed.sums.num_valid:
            why = self._standing_out(found, computed)
        if self._peers.any(bool(why)):
            told = [text for texts in self._peers.all_gather(why) for text in texts]
            self._state.engine.take_copies()  # a step records the copies of one computation
            computed = compute()
            self._compare(step, found, self._figures(computed))
            self._say(f"step {step}: {first_of(told)}: computed again, with the same result")
        if computed.sums.num_valid and found.is_finite and found.norm:
            self._elements.add(found.shares)
            for name, value in found.watched.items():
                self._usual.setdefault(name, UsualFigure()).add(value)
        return computed

    def _figures(self, computed: Computed) -> _Figures:
        sums, norms = computed.sums, self._state.sharded.added_norms
        values = torch.stack([*norms.values()]).tolist() if norms else []
        added = dict(zip(norms, values, strict=True))
        largest = self._state.largest_elements(sums.gradients)
        return _Figures(sums.loss, sums.norm, largest, added)

    def _standing_out(self, found: _Figures, computed: Computed) -> list[str]:
        """Return what stands out in the figures of a step, as text."""
        if not found.is_finite:
            return [f"loss {found.loss}, gradient norm {found.norm}"]
        shares = found.shares
        return [
            f"{name} {value:.4g}"
            for name, value in (found.watched if found.norm else {}).items()
            if name in self._usual and self._usual[name].is_left_by(value)
        ] + [
            f"an element of {name} has {shares[name]:.0%} of the gradient norm"
            for name in self._elements.standing_out(shares)
            if is_alone(shares[name], second_largest(computed.sums.gradients[name]) / found.norm)
        ]

    def _compare(self, step: int, first: _Figures, again: _Figures) -> None:
        """Blame a rank unless both computations of a step gave the same, or none a number."""
        if not (first.is_finite or again.is_finite):
            return
        slack = self._tolerance * (again.norm if math.isfinite(again.norm) else first.norm)

        def different(of: Callable[[_Figures], Mapping[str, float]]) -> list[str]:
            then, now = of(first), of(again)
            return [name for name in then if not abs(then[name] - now[name]) <= slack]  # or NaN

        same_loss = abs(first.loss - again.loss) <= self._tolerance * abs(again.loss)
        same_norm = abs(first.norm - again.norm) <= slack
        told = self._peers.all_gather(
            (
                self._job.mesh.at.pipeline,
                different(lambda figures: figures.added),
                different(lambda figures: figures.largest),
            )
        )
        if same_loss and same_norm and not any(added or largest for _, added, largest in told):
            return
        what = (
            f"step {step}: loss {first.loss} and gradient norm {first.norm} became {again.loss} "
            f"and {again.norm} when computed again from the same inputs"
        )
        self._blame(blamed_ranks(told, is_of_backward=same_loss), what)

    def _blame(self, ranks: Mapping[int, Sequence[str]], what: str) -> NoReturn:
        """Raise an error on every rank that says which ranks may have wrong values, and of what."""
        numbers = first_of([*map(str, ranks)])
        who = f"rank {numbers}" if len(ranks) == 1 else f"one of ranks {numbers}"
        text = f"{who} computed or kept wrong values"
        names = ranks.get(self._peers.rank)
        if names is None:
            raise PeerLostError(text)
        of = f": {first_of(names)}" if names else ""
        raise CorruptionError(
            f"{text}: {what}{of}; no update was made with it, checkpoints are from before: replace "
            "that device"
        )


def blamed_ranks(
    told: Sequence[tuple[int, Sequence[str], Sequence[str]]], *, is_of_backward: bool
) -> dict[int, Sequence[str]]:
    """Return the ranks that may have computed wrong, with the names of their gradients.

    Wrong gradients of activations go from a stage to those before it, so the last stage of those
    that added other gradients is to blame. A wrong forward changes what all stages add. If no rank
    added anything else, the sum over ranks went wrong, or was kept wrong.

    Args:
        told: Stage of each rank, the rows to which it added other gradients than before, and the
            tensors of which its sums over ranks are others.
        is_of_backward: Whether the loss was the same.
    """
    found = {rank: added for rank, (_, added, _) in enumerate(told) if added}
    if is_of_backward:
        last = max((told[rank][0] for rank in found), default=0)
        found = {rank: names for rank, names in found.items() if told[rank][0] == last}
    summed = {rank: names for rank, (_, _, names) in enumerate(told) if names}
    return found or summed or {rank: [] for rank in range(len(told))}


def sums_of_bits(rows: Iterable[Tensor]) -> Tensor:
    """Return for each flat row the sum of its bits as 64-bit words, modulo 2^64, as int64.

    Any one bit changes it by a power of two. Needs no temporary memory.
    """
    sums = []
    for row in rows:
        whole = row.nbytes // 8 * 8 // row.element_size()
        sums.append(row[:whole].view(torch.int64).sum() + row[whole:].view(torch.uint8).sum())
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)
