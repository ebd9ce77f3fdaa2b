"""Tiers of weights, gradients and optimizer state while nothing computes with them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

StateTier = Literal["device", "host", "disk"]
"""Memory of the device, of the host behind it, or a file on a disk."""


@dataclass(frozen=True, slots=True)
class StateTiers:
    """The tier of each part of the training state.

    Weights and gradients of a tier behind the device are on it for one stage in use, and one that
    comes or goes (:mod:`sppo.schedule.transfers.state_streaming`). The optimizer steps where
    its state is, bucket by bucket.

    Attributes:
        weights: In the compute dtype.
        gradients: fp32 sums over the step.
        optimizer: fp32 masters and both moments.
    """

    weights: StateTier = "device"
    gradients: StateTier = "device"
    optimizer: StateTier = "device"

    @property
    def streams_weights(self) -> bool:
        """Return whether weights come to the device stage by stage."""
        return self.weights != "device"

    @property
    def streams_gradients(self) -> bool:
        """Return whether gradients leave the device stage by stage."""
        return self.gradients != "device"

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether the optimizer steps somewhere else than on the device."""
        return self.optimizer != "device"

    @property
    def leaves_device(self) -> bool:
        """Return whether any part lives behind the device."""
        return any(getattr(self, field.name) != "device" for field in fields(self))

    def text(self) -> str:
        """Say what lives behind the device, and where; "on the device" if nothing does."""
        parts = [field.name for field in fields(self) if getattr(self, field.name) != "device"]
        if not parts:
            return "on the device"
        return f"{', '.join(parts)} on {getattr(self, parts[-1])}"


ON_DEVICE = StateTiers()
"""Everything on the device."""
