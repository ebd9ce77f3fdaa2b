"""torch's fused AdamW kernel on masters and moments that the caller owns.

:class:`torch.optim.AdamW` calls the same function, but its first instance imports torch's compiler,
which takes one or two seconds and tens of MiB in every training process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from sppo.config.optimizer import OptimizerConfig
from sppo.cost.parameter_groups import UpdateRule

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments of a parameter in torch's AdamW."""


class FusedAdamW:
    """Update of parameters with the same learning rate and weight decay, in one kernel call.

    Args:
        masters: Parameters in fp32 or float64; every step writes them.
        moments: For each of :data:`MOMENTS`, one tensor like each parameter; every step writes
            them.
        config: Optimizer configuration, of which betas and eps are used.
        rule: Factor of the learning rate, and weight decay of these parameters.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        *,
        config: OptimizerConfig,
        rule: UpdateRule,
    ) -> None:
        self._masters, self._moments = list(masters), [list(moment) for moment in moments]
        self._config, self._rule = config, rule
        # The kernel reads the step count on the device of the parameter.
        self._steps = [torch.zeros((), dtype=torch.float32, device=m.device) for m in masters]

    def step(self, gradients: Sequence[Tensor], *, lr: float) -> None:
        """Update the parameters once (Loshchilov and Hutter, 2019, algorithm 2).

        Args:
            gradients: Gradient of each parameter, in the parameter's dtype.
            lr: Learning rate of the schedule in this step.
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
            lr=lr * self._rule.lr_factor,
            weight_decay=self._rule.weight_decay,
            eps=self._config.eps,
            maximize=False,
        )

    def set_steps(self, steps: int) -> None:
        """Set the number of updates done so far."""
        for count in self._steps:
            count.fill_(steps)
