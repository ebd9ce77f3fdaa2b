"""Stretching of rotary positions to longer contexts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from sppo.config.base import Section, Tokens


class RopeScaling(Section):
    """Stretching of rotary frequencies beyond the context length of the original training."""

    type: Literal["linear", "llama3", "yarn"]
    """linear: all frequencies are stretched alike; llama3: only long wavelengths; yarn: by the
    number of rotations within the original context, with a temperature of attention."""
    factor: float = Field(default=1.0, ge=1.0)
    """Factor by which the context becomes longer."""
    original_max_positions: Tokens | None = None
    """Context length before stretching (``llama3`` and ``yarn``)."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """``llama3``: wavelengths above original / low_freq_factor are divided by ``factor``."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """``llama3``: wavelengths below original / high_freq_factor are not changed."""
    beta_fast: float = Field(default=32.0, gt=0)
    """``yarn``: rotations within the original context above which a frequency is not stretched."""
    beta_slow: float = Field(default=1.0, gt=0)
    """``yarn``: rotations within the original context below which a frequency is stretched
    fully."""
    attention_factor: float | None = Field(default=None, gt=0)
    """``yarn``: scale of cos and sin; null computes 0.1 ln(factor) + 1."""
    truncate: bool = True
    """``yarn``: whether the ramp between fast and slow frequencies begins and ends at a whole pair
    of dimensions."""

    @model_validator(mode="after")
    def _needs_original_length(self) -> Self:
        if self.type != "linear" and self.original_max_positions is None:
            raise ValueError(
                f"type {self.type} needs original_max_positions: the length before stretching"
            )
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("low_freq_factor must be below high_freq_factor")
        if self.type == "yarn" and self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast {self.beta_fast:g} is below beta_slow {self.beta_slow:g}, so that fast "
                "pairs would be stretched and slow ones kept; exchange the two (usual are 32 and 1)"
            )
        return self
