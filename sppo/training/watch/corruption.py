"""Watch for values that a device computed or kept wrong without any error (silent corruption).

Weights change only in updates, so a sum over their bits after an update is the same before the
next: any flipped bit shows. Gradients are judged by figures: the loss, the norm, this rank's part
of it, and the largest element of each tensor. A step in which one stands out
(:mod:`sppo.training.watch.usual`) is computed again from the same inputs. Equal figures mean that
the data is unusual; others that a device computed wrong.

Not seen are optimizer states, weights that stay on host or disk, and wrong gradients that leave all
figures as usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from sppo.parallel.job.peer_errors import PeerLostError
from sppo.training.interruption import CorruptionError
from sppo.training.job import Job
from sppo.training.state import TrainingState
from sppo.training.watch.computed import Computed, StepSums
from sppo.training.watch.nonfinite import first_of
from sppo.training.watch.usual import EFFECT, ElementShares, UsualFigure

_CONSEQUENCE = "no update was made with it, checkpoints are from before: replace that device"


@dataclass(frozen=True, slots=True)
class _Figures:
    """Figures of one computation of a step."""

    loss: float
    norm: float
    """Norm of the gradients of all ranks."""
    largest: Mapping[str, float]
    """Largest magnitude in each gradient that this rank updates, by global name."""
    added: Mapping[str, float]
    """Norms of what this rank added to gradients, before any reduction, by key of its row."""

    @property
    def is_finite(self) -> bool:
        """True if loss and norm are neither NaN nor infinite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    @property
    def shares(self) -> dict[str, float]:
        """Largest share of one element in the norm, by tensor."""
        return {name: most / self.norm for name, most in self.largest.items() if most}

    @property
    def part(self) -> float:
        """Norm of all that this rank added, as a share of the norm of all ranks."""
        return math.hypot(*self.added.values()) / self.norm if self.norm else 0.0


class _Told(NamedTuple):
    """Findings of a rank after a second computation, for all others."""

    stage: int
    """Place of the rank in its pipeline."""
    added: list[str]
    """Rows to which it added other gradients than before."""
    largest: list[str]
    """Tensors whose reduced gradients on this rank are others than before."""


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
        self._loss, self._norm, self._part = UsualFigure(), UsualFigure(), UsualFigure()
        self._shares = ElementShares()
        elsewhere = {*state.sharded.streamed_keys(state.tiers)}
        rows = {key: row for key, row in state.weights.items() if key not in elsewhere}
        self._kept = {**rows, **state.choice_biases}
        self.note_weights()

    # Weights

    def note_weights(self) -> None:
        """Note the bits of the weights, which an update or a checkpoint has just written."""
        self._sums = self._sums_of_bits()

    def check_weights(self, step: int) -> None:
        """Check that the weights are what the last update wrote. Collective.

        Args:
            step: Number of the step that is to use them, or to be saved.

        Raises:
            CorruptionError: Some weight of this rank is not.
            PeerLostError: Some weight of another rank is not.
        """
        changed = self._changed_weights()
        if self._peers.any(bool(changed)):
            self._fail_by_weights(step, changed)

    def _sums_of_bits(self) -> Tensor:
        sums = [sum_of_bits(row) for row in self._kept.values()]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)

    def _changed_weights(self) -> list[str]:
        equal = (self._sums_of_bits() == self._sums).tolist()
        return [key for key, is_equal in zip(self._kept, equal, strict=True) if not is_equal]

    def _fail_by_weights(self, step: int, changed: list[str]) -> NoReturn:
        told = self._peers.all_gather(changed)
        what = f"step {step}: weights changed without an update"
        self._blame({rank: f"{what}: {first_of(keys)}" for rank, keys in enumerate(told) if keys})

    # Steps

    def confirmed(self, step: int, compute: Callable[[], Computed]) -> Computed:
        """Compute a step, and once more if a figure of it stands out. Collective.

        Args:
            step: Number of the step, counted from 1.
            compute: Function that computes it from the same inputs at each call.

        Returns:
            The last computation.

        Raises:
            CorruptionError: Weights of this rank changed, or it computed other figures again.
            PeerLostError: The same of another rank.
        """
        computed = compute()
        figures, changed = self._figures(computed), self._changed_weights()
        why = self._standing_out(figures) if computed.sums.num_valid else []
        if self._peers.any(bool(changed or why)):
            self.check_weights(step)
            told = [text for texts in self._peers.all_gather(why) for text in texts]
            self._say(f"step {step}: {first_of(told)}: the step is computed again")
            self._state.engine.take_copies()  # a step records the copies of one computation
            computed = compute()
            self._compare(step, figures, self._figures(computed))
        self._add(figures, computed.sums)
        return computed

    def _figures(self, computed: Computed) -> _Figures:
        sums, added = computed.sums, self._state.sharded.added_norms
        values = torch.stack([*added.values()]).tolist() if added else []
        return _Figures(
            sums.loss,
            sums.norm,
            largest=self._state.largest_elements(sums.gradients),
            added=dict(zip(added, values, strict=True)),
        )

    def _standing_out(self, figures: _Figures) -> list[str]:
        """Return what stands out in the figures of a step, as text."""
        if not figures.is_finite:
            return [f"loss {figures.loss}, gradient norm {figures.norm}"]
        shares = figures.shares
        found = [
            f"an element of {name} has {shares[name]:.0%} of the gradient norm"
            for name in self._shares.standing_out(shares)
        ]
        if self._part.stands_out(figures.part):
            found.append(f"a rank adds {figures.part:.2g} times the gradient norm")
        if self._loss.stands_out(figures.loss):
            found.append(f"loss {figures.loss:.4g}")
        if self._norm.stands_out(figures.norm):
            found.append(f"gradient norm {figures.norm:.4g}")
        return found

    def _add(self, figures: _Figures, sums: StepSums) -> None:
        """Add the figures of a step to the history, unless it has no loss."""
        if sums.num_valid and figures.is_finite:
            self._loss.add(figures.loss)
            self._norm.add(figures.norm)
            self._part.add(figures.part)
            self._shares.add(figures.shares)

    def _compare(self, step: int, first: _Figures, again: _Figures) -> None:
        """Blame a rank unless both computations of a step gave the same."""
        same_loss = self._are_same(first.loss, again.loss)
        if same_loss and self._are_same(first.norm, again.norm):
            return
        told = self._peers.all_gather(
            _Told(
                self._job.mesh.at.pipeline,
                self._different(first.added, again.added),
                self._different(first.largest, again.largest),
            )
        )
        what = (
            f"step {step}: loss {first.loss} and gradient norm {first.norm} became {again.loss} "
            f"and {again.norm} when computed again from the same inputs"
        )
        names = blamed_ranks(told, is_of_backward=same_loss)
        self._blame(
            {rank: f"{what}: {first_of(found)}" if found else what for rank, found in names.items()}
        )

    def _different(self, first: Mapping[str, float], again: Mapping[str, float]) -> list[str]:
        return [name for name in first if not self._are_same(first[name], again[name])]

    def _are_same(self, one: float, other: float) -> bool:
        if math.isfinite(one) and math.isfinite(other):
            return math.isclose(one, other, rel_tol=self._tolerance)
        return repr(one) == repr(other)

    def _blame(self, texts: Mapping[int, str]) -> NoReturn:
        """Raise an error on every rank that says which rank has wrong values.

        Args:
            texts: What is wrong, by rank that may be to blame.
        """
        ranks = ", ".join(map(str, texts))
        who = f"rank {ranks}" if len(texts) == 1 else f"one of ranks {ranks}"
        own = texts.get(self._peers.rank)
        if own is not None:
            raise CorruptionError(f"{who} computed or kept wrong values: {own}; {_CONSEQUENCE}")
        raise PeerLostError(f"{who} computed or kept wrong values")


def blamed_ranks(told: Sequence[_Told], *, is_of_backward: bool) -> dict[int, list[str]]:
    """Return the ranks that may have computed wrong, with the names of their gradients.

    A rank is told by what it added to gradients before these were summed over ranks. If no rank
    added anything else, the sum itself went wrong. Wrong gradients of activations go from a stage
    to those before it, so the last stage of those with other gradients is to blame; a wrong forward
    changes all stages, and leaves all of them.

    Args:
        told: Findings of each rank.
        is_of_backward: Whether the loss was the same.
    """
    found = {rank: one.added for rank, one in enumerate(told) if one.added}
    if found and is_of_backward:
        last = max(told[rank].stage for rank in found)
        return {rank: names for rank, names in found.items() if told[rank].stage == last}
    summed = {rank: one.largest for rank, one in enumerate(told) if one.largest}
    return found or summed or {rank: [] for rank in range(len(told))}


def sum_of_bits(row: Tensor) -> Tensor:
    """Return the sum of a flat row's bits as 64-bit words, modulo 2^64, without temporaries.

    Any one bit changes it by a power of two.
    """
    whole = row.nbytes // 8 * 8 // row.element_size()
    return row[:whole].view(torch.int64).sum() + row[whole:].view(torch.uint8).sum()
