"""AdamW on fp32 master weights.

Gradients are fp32, already summed over the step; the engine's weights may have a smaller compute
dtype. All parameters are dictionaries by global name, in the order of the model's inventory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from sppo.checkpoint.checkpoint import MODEL_PREFIX
from sppo.config.optimizer import OptimizerConfig
from sppo.cost.parameter_groups import by_update_rule
from sppo.optim.fused_adamw import MOMENTS, FusedAdamW

STEP_KEY = "optimizer.step"


class MasterState(ABC):
    """Masters and moments of parameters, and the number of updates, as a checkpoint has them.

    Args:
        masters: fp32 (or float64) values of the parameters by global name.
        moments: For each of :data:`MOMENTS`, a tensor like each master by global name, in its
            dtype or in bf16.
    """

    def __init__(
        self, masters: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        self._masters, self._moments = masters, moments
        self._updates: list[FusedAdamW] = []
        self._steps = 0

    @property
    def steps(self) -> int:
        """Number of updates done, without skipped steps."""
        return self._steps

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """Values of the parameters in at least fp32, by global name."""
        return self._masters

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint saves and a resumed run needs, in one flat dictionary.

        ``model.NAME`` are the masters, ``optimizer.exp_avg.NAME`` and ``optimizer.exp_avg_sq.NAME``
        the moments, all of them no copies, and ``optimizer.step`` is the number of updates, int64.
        To load a checkpoint, fill the tensors in place and pass them to :meth:`load_state`.
        """
        state = {f"{MODEL_PREFIX}{name}": master for name, master in self._masters.items()}
        for moment, tensors in self._moments.items():
            state |= {f"optimizer.{moment}.{name}": tensor for name, tensor in tensors.items()}
        state[STEP_KEY] = torch.tensor(self._steps)
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load ``state`` of another optimizer, or this one's :meth:`state` filled in place."""
        own = self.state()
        assert state.keys() == own.keys(), "state() of an optimizer of the same model"
        for key, tensor in own.items():
            if tensor is not state[key]:
                tensor.copy_(state[key])
        self._steps = int(own[STEP_KEY])
        for update in self._updates:
            update.set_steps(self._steps)
        self._compute_weights()

    @abstractmethod
    def _compute_weights(self) -> None:
        """Round the masters to the weights."""


class AdamW(MasterState):
    """AdamW by torch's fused kernel on fp32 masters, from which weights are rounded.

    Weights that are fp32 (or float64, in tests) are their own masters, without a copy. The moments
    exist, as zeros, from the start, so a checkpoint of step 0 is like any other.

    Args:
        weights: Weights that the engine computes with, by global name; every step writes them.
        config: Optimizer configuration, of which betas, eps, weight decay, groups and the precision
            of moments are used.
        masters: fp32 values that weights in the compute dtype were rounded from; kept, not copied.
            None converts the weights.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        config: OptimizerConfig,
        masters: Mapping[str, Tensor] | None = None,
    ) -> None:
        own = {
            name: _master(weight, None if masters is None else masters[name])
            for name, weight in weights.items()
        }
        narrow = torch.bfloat16 if config.moments == "bf16" else None
        super().__init__(
            own,
            {m: {n: torch.zeros_like(o, dtype=narrow) for n, o in own.items()} for m in MOMENTS},
        )
        rounded = [name for name, weight in weights.items() if own[name] is not weight]
        self._rounded = [weights[name] for name in rounded]
        self._converted_masters = [own[name] for name in rounded]
        groups = by_update_rule(own, config)
        self._names = [*groups.values()]
        for rule, names in groups.items():
            parameters, *moments = (
                [tensors[name] for name in names] for tensors in (own, *self._moments.values())
            )
            self._updates.append(FusedAdamW(parameters, moments, config=config, rule=rule))
        self._compute_weights()

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], *, lr: float) -> None:
        """Update masters and weights once (Loshchilov and Hutter, 2019, algorithm 2).

        Args:
            gradients: Gradient of each weight by global name, in the master's dtype; not kept.
            lr: Learning rate of this step.
        """
        assert gradients.keys() == self._masters.keys(), "a gradient for every weight"
        for names, update in zip(self._names, self._updates, strict=True):
            update.step([gradients[name] for name in names], lr=lr)
        self._steps += 1
        self._compute_weights()

    @torch.no_grad()
    def _compute_weights(self) -> None:
        if self._rounded:
            torch._foreach_copy_(self._rounded, self._converted_masters)


def _master(weight: Tensor, given: Tensor | None) -> Tensor:
    if weight.dtype in (torch.float32, torch.float64):
        assert given is None or given is weight, "a weight of at least fp32 is its own master"
        return weight
    if given is None:
        return weight.detach().to(torch.float32)
    assert given.dtype == torch.float32, f"master in {given.dtype}"
    assert given.shape == weight.shape, f"master {given.shape}, weight {weight.shape}"
    return given
