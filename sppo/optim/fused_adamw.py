"""torch's fused AdamW on masters and moments that the caller holds.

:class:`torch.optim.AdamW` calls the same function, and imports torch's compiler when the first one
is made: a second or two and tens of MiB in every process that trains.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from sppo.config.run import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of a parameter's moments, as torch's AdamW has them."""


class FusedAdamW:
    """Parameters that are updated by one call, with the same weight decay.

    Args:
        masters: the parameters, fp32 or float64; written by every step.
        moments: of each of :data:`MOMENTS` a tensor for every parameter, like it; written, too.
        config: betas and eps.
        weight_decay: of these parameters.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        *,
        config: OptimizerConfig,
        weight_decay: float,
    ) -> None:
        self._masters, self._moments = list(masters), [list(moment) for moment in moments]
        self._config, self._weight_decay = config, weight_decay
        # The kernel reads the number of the step where the parameter is.
        self._steps = [torch.zeros((), dtype=torch.float32, device=m.device) for m in masters]

    def step(self, gradients: Sequence[Tensor], *, lr: float) -> None:
        """Update the parameters once (Loshchilov and Hutter, 2019, algorithm 2).

        Args:
            gradients: one for each, of its dtype.
            lr: of this step.
        """
        averages, squares = self._moments
        beta1, beta2 = self._config.betas
        adamw(
            self._masters,
            list(gradients),
            averages,
            squares,
            [],
            self._steps,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=self._weight_decay,
            eps=self._config.eps,
            maximize=False,
        )

    def set_steps(self, steps: int) -> None:
        """Let the next update be the one after ``steps`` others."""
        for count in self._steps:
            count.fill_(steps)
