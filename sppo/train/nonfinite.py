"""Steps whose loss or gradient is NaN or infinite: what is wrong, and how often it may be."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_NAMED = 4


class NonFiniteError(RuntimeError):
    """Training stopped because losses or gradients were not finite."""


class NonFiniteGuard:
    """Decides for each step whether its update may be applied.

    Args:
        stop_at_once: stop at the first such step instead of skipping it.
        limit: most such steps in a row that are skipped.
    """

    def __init__(self, *, stop_at_once: bool, limit: int) -> None:
        self._limit = 0 if stop_at_once else limit
        self._in_a_row = 0

    def problem(
        self, *, step: int, loss: float, norm: float, gradients: Mapping[str, Tensor]
    ) -> str | None:
        """None for a healthy step, else what is not finite; the update must then be skipped.

        Raises:
            NonFiniteError: more such steps in a row than allowed.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        report = f"step {step}: loss {loss}, gradient norm {norm}; {_culprits(gradients)}"
        if self._in_a_row > self._limit:
            raise NonFiniteError(
                f"{report}. {self._in_a_row} such steps in a row, train.max_nonfinite_steps and "
                f"train.nonfinite allow {self._limit}. The last checkpoint is untouched; lower "
                "optimizer.lr, lengthen optimizer.warmup_steps, or try train.dtype=fp32"
            )
        return f"{report}. The update is skipped"


def _culprits(gradients: Mapping[str, Tensor]) -> str:
    bad = [name for name, g in gradients.items() if not torch.isfinite(g).all()]
    if not bad:
        return "every gradient is finite"
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    return f"not finite in the gradients of {', '.join(bad[:_NAMED])}{more}"
