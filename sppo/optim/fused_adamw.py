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
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 22
"""Elements whose moments are converted at a time: few enough for the cache of a CPU, and on a
device so many that few kernels are launched."""


class FusedAdamW:
    """Update of parameters with the same learning rate and weight decay, in one kernel call.

    Args:
        masters: Parameters in fp32 or float64; every step writes them.
        moments: For each of :data:`MOMENTS`, one tensor like each parameter, in its dtype or in
            bf16; every step writes them. The kernel computes with moments in the dtype of the
            parameters, so bf16 moments are converted, a chunk of a parameter at a time.
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
        if all(
            m.dtype == own.dtype for m, own in zip(self._moments[0], self._masters, strict=True)
        ):
            averages, squares = self._moments
            self._call(self._masters, gradients, averages, squares, self._steps, lr=lr)
            return
        columns = zip(self._masters, gradients, *self._moments, self._steps, strict=True)
        for *tensors, count in columns:
            done = count.clone()
            chunk = _CPU_CHUNK if count.device.type == "cpu" else _DEVICE_CHUNK
            flat = (torch.split(tensor.view(-1), chunk) for tensor in tensors)
            for master, gradient, *narrow in zip(*flat, strict=True):
                wide = [moment.to(master.dtype) for moment in narrow]
                count.copy_(done)  # which every call raises by one
                average, square = wide
                self._call([master], [gradient], [average], [square], [count], lr=lr)
                torch._foreach_copy_(narrow, wide)

    def _call(
        self,
        masters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        averages: Sequence[Tensor],
        squares: Sequence[Tensor],
        steps: Sequence[Tensor],
        *,
        lr: float,
    ) -> None:
        beta1, beta2 = self._config.betas
        adamw(
            list(masters),
            list(gradients),
            list(averages),
            list(squares),
            [],
            list(steps),
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
