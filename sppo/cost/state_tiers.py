"""Tiers in which weights, gradients and optimizer state live while nothing computes with them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sppo.hardware.description import Tier


@dataclass(frozen=True, slots=True)
class StateTiers:
    """Tier of each part of the training state.

    Weights and gradients that do not live on the device are on it for the stage in use and for one
    stage that is copied (:mod:`sppo.schedule.transfers.copies`). The optimizer steps in
    the tier of its state, bucket by bucket. Weights that it updates leave the device only with it,
    frozen weights also without it.
    """

    weights: Tier = "device"
    """Tier of frozen weights in the compute dtype; weights that train are on the device unless the
    optimizer is off it."""
    gradients: Tier = "device"
    """Tier of fp32 sums of gradients over the step."""
    optimizer: Tier = "device"
    """Tier of fp32 masters and both moments."""

    @property
    def streams_weights(self) -> bool:
        """True if weights are copied to the device stage by stage."""
        return self.weights != "device"

    @property
    def streams_trained_weights(self) -> bool:
        """True if weights that train are copied to the device as frozen ones are."""
        return self.streams_weights and self.offloads_optimizer

    @property
    def streams_gradients(self) -> bool:
        """True if gradients are copied from the device stage by stage."""
        return self.gradients != "device"

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimizer steps in another tier than the device."""
        return self.optimizer != "device"

    @property
    def leaves_device(self) -> bool:
        """True if any part of the training state lives in another tier than the device."""
        return bool(self._away)

    @property
    def tier(self) -> Tier:
        """Tier that all parts off the device share; "device" if all parts are on the device."""
        tier: Tier = getattr(self, self._away[-1]) if self._away else "device"
        return tier

    def text(self) -> str:
        """Return text that names the parts off the device and their tier, or "on the device"."""
        return f"{', '.join(self._away)} on {self.tier}" if self._away else "on the device"

    @property
    def _away(self) -> tuple[str, ...]:
        """Names of the parts that do not live on the device."""
        names = (field.name for field in fields(self))
        return tuple(name for name in names if getattr(self, name) != "device")


ON_DEVICE = StateTiers()
"""Tiers of a training state that lives on the device."""
