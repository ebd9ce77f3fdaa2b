"""Detection of NaN and infinite losses, gradients and states, and the limit on such steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sppo.checkpoint.state_block import StateBlock
from sppo.config import RunConfig
from sppo.parallel.host_collectives import HostCollectives
from sppo.training.step import StepSums

_NAMED = 4


class NonFiniteError(RuntimeError):
    """Training stopped because losses, gradients or the state were not finite."""


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
        told = self._peers.all_gather(_nonfinite_names(sums.gradients))
        bad = sorted({name for names in told for name in names})
        where = f"not finite in the gradients of {_first_of(bad)}"
        culprits = where if bad else "every gradient is finite"
        report = f"step {step}: loss {sums.loss}, gradient norm {sums.norm}; {culprits}"
        if self._in_a_row > self._limit:
            raise NonFiniteError(
                f"{report}. {self._in_a_row} such steps in a row, train.max_nonfinite_steps and "
                f"train.nonfinite allow {self._limit}. Earlier checkpoints are untouched; start "
                "anew in another train.output with a lower optimizer.lr, longer "
                "optimizer.warmup_steps, or train.dtype=fp32"
            )
        return f"{report}. The update is skipped"


def nonfinite_state(state: Mapping[str, Tensor]) -> str | None:
    """Return the names of tensors with NaN or infinity, as a message; None if all are finite."""
    bad = _nonfinite_names(state)
    return f"not finite: {_first_of(bad)}" if bad else None


def nonfinite_place(state: Mapping[str, StateBlock]) -> str | None:
    """Return tensor and row of the first NaN or infinite value; None if all are finite."""
    for name, block in state.items():
        if block.tensor.numel() and not _is_finite(block.tensor):
            bad = ~torch.isfinite(block.tensor)
            rows = bad.reshape(bad.shape[0], -1).any(1) if bad.dim() else bad.reshape(1)
            first = int(rows.nonzero()[0]) + (block.offsets[0] if block.offsets else 0)
            more = f" and {int(rows.sum()) - 1} more" if rows.sum() > 1 else ""
            return f"{name} is not finite in row {first}{more} of {(*block.global_shape, 1)[0]}"
    return None


def _nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not _is_finite(tensor)]


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite.

    NaN and infinity show in the minimum and maximum, which need no temporary memory.
    """
    return all(bool(torch.isfinite(extreme)) for extreme in tensor.aminmax())


def _first_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
