"""Tiers of weights, gradients and optimizer state while nothing computes with them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sppo.hardware.description import Tier


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

    weights: Tier = "device"
    gradients: Tier = "device"
    optimizer: Tier = "device"

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
        return bool(self._away)

    @property
    def tier(self) -> Tier:
        """The one tier of all parts that live behind the device; "device" if none does."""
        tier: Tier = getattr(self, self._away[-1]) if self._away else "device"
        return tier

    def text(self) -> str:
        """Say what lives behind the device, and where; "on the device" if nothing does."""
        return f"{', '.join(self._away)} on {self.tier}" if self._away else "on the device"

    @property
    def _away(self) -> tuple[str, ...]:
        """Names of the parts that live behind the device."""
        names = (field.name for field in fields(self))
        return tuple(name for name in names if getattr(self, name) != "device")


ON_DEVICE = StateTiers()
"""Everything on the device."""
