"""Steps whose loss or gradients are not finite: named, skipped, and counted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sppo.config import RunConfig
from sppo.parallel.host_collectives import HostCollectives
from sppo.training.interruption import NonFiniteError
from sppo.training.watch.computed import StepSums

START_ANEW = (
    "earlier checkpoints are untouched: start anew in another train.output with a lower "
    "optimizer.lr, longer optimizer.warmup_steps, or train.dtype=fp32"
)
"""Advice where a run ends as its loss or its state is not finite."""
_NAMED = 4


class NonFiniteGuard:
    """Decides for each step whether its update may be applied.

    Args:
        run: Run configuration, with the limit on steps in a row whose updates are skipped.
        peers: Collectives over all ranks, which decide together.
    """

    def __init__(self, run: RunConfig, peers: HostCollectives) -> None:
        self._peers = peers
        self._limit = 0 if run.train.nonfinite == "stop" else run.train.max_nonfinite_steps
        self._in_a_row = 0

    @property
    def failing(self) -> bool:
        """True if the last step was not finite."""
        return self._in_a_row > 0

    def problem(self, step: int, sums: StepSums) -> str | None:
        """Return why the update of a step must be skipped; None if loss and norm are finite.

        Args:
            step: Number of the step, counted from 1.
            sums: Loss and gradients of the step.

        Raises:
            NonFiniteError: More steps in a row were not finite than allowed.
        """
        if math.isfinite(sums.loss) and math.isfinite(sums.norm):
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        told = self._peers.all_gather(nonfinite_names(sums.gradients))
        bad = sorted({name for names in told for name in names})
        where = f"not finite in the gradients of {first_of(bad)}"
        culprits = where if bad else "every gradient is finite"
        report = f"step {step}: loss {sums.loss}, gradient norm {sums.norm}; {culprits}"
        if self._in_a_row > self._limit:
            raise NonFiniteError(
                f"{report}. {self._in_a_row} such steps in a row, train.max_nonfinite_steps and "
                f"train.nonfinite allow {self._limit}; {START_ANEW}"
            )
        return f"{report}. The update is skipped"


def nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that have NaN or infinite values.

    These show in the minimum and maximum, which need no temporary memory.
    """
    return [
        name
        for name, tensor in tensors.items()
        if tensor.numel() and not all(bool(torch.isfinite(value)) for value in tensor.aminmax())
    ]


def first_of(names: Sequence[str]) -> str:
    """Return the first few of some names as text, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
