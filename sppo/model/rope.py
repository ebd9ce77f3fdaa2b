"""Rotary frequencies, plain or scaled for longer contexts, and tables of their angles.

Frequencies and angles are computed in fp32 in the order of the Hugging Face models, so that weights
trained with those models get the same rotations; float64 models get float64 angles.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from sppo.config.model import ModelConfig, RopeScaling, Rotation
from sppo.kernels.elementwise import accumulation_dtype
from sppo.kernels.rotary import RotaryTable


class RotaryTables:
    """Rotary tables of some tokens: one for each rotation of the layers, made when it is needed.

    Args:
        model: Model configuration.
        positions_C: Token positions, any integers.
        dtype: Type of the activations.
    """

    def __init__(self, model: ModelConfig, positions_C: Tensor, *, dtype: torch.dtype) -> None:
        self._model, self._positions_C, self._dtype = model, positions_C, dtype
        self._made: dict[Rotation, RotaryTable] = {}

    def of_layer(self, layer: int) -> RotaryTable | None:
        """Return the table of `layer`; None if it does not rotate."""
        rotation = self._model.layer_type(layer).rotation
        if rotation is None:
            return None
        if rotation not in self._made:
            self._made[rotation] = rotary_table(
                self._model, rotation, self._positions_C, dtype=self._dtype
            )
        return self._made[rotation]


def rotary_table(
    model: ModelConfig, rotation: Rotation, positions_C: Tensor, *, dtype: torch.dtype
) -> RotaryTable:
    """Return the cosine and sine of each position's angles, ``[C, 1, P]`` of P pairs.

    Args:
        model: Model configuration.
        rotation: Rotation of a layer.
        positions_C: Token positions, any integers.
        dtype: Type of the activations; the table is in fp32, or float64 for float64.
    """
    acc_dtype = accumulation_dtype(dtype)
    frequencies, scale = _frequencies_on(positions_C.device, model, rotation, acc_dtype)
    angles = positions_C.to(acc_dtype)[:, None] * frequencies
    return RotaryTable((angles.cos() * scale).unsqueeze(1), (angles.sin() * scale).unsqueeze(1))


@functools.lru_cache(maxsize=8)
def _frequencies_on(
    device: torch.device, model: ModelConfig, rotation: Rotation, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """Return the frequencies on the device, cached because the copy would block the host."""
    frequencies, scale = rotary_frequencies(model, rotation, dtype=dtype)
    return frequencies.to(device), scale


def rotary_frequencies(
    model: ModelConfig, rotation: Rotation, *, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """Return (radians per token for each of P pairs, factor of cosine and sine)."""
    size, scaling = model.rotary_size, model.rope_scaling if rotation.is_scaled else None
    exponents = torch.arange(0, size, 2, dtype=torch.int64).to(dtype) / size
    frequencies = 1.0 / (rotation.theta**exponents)
    if scaling is None:
        return frequencies, 1.0
    if scaling.type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.type == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, scaling, theta=rotation.theta, size=size)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return Llama 3.1's frequencies: long wavelengths scaled, short ones kept, a blend between."""
    original = scaling.original_max_positions
    assert original is not None, "RopeScaling checks this"
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelength > original / low, frequencies / scaling.factor, blended)
    return torch.where(wavelength < original / high, frequencies, scaled)


def _yarn(
    frequencies: Tensor, scaling: RopeScaling, *, theta: float, size: int
) -> tuple[Tensor, float]:
    """Return (frequencies, factor of cosine and sine) of YaRN (Peng et al., 2023, eq. 17-22).

    Slow pairs are divided by the scaling factor, fast pairs are kept, with a ramp between.
    """
    original = scaling.original_max_positions
    assert original is not None, "RopeScaling checks this"

    def pair_of(rotations: float) -> float:
        """Return the index of the pair that turns ``rotations`` times in the original context."""
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = high - low or 0.001  # negative if both are beyond the head, as in transformers
    pairs = torch.arange(frequencies.shape[0], dtype=frequencies.dtype)
    ramp = ((pairs - low) / span).clamp(0, 1)
    stretched = frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
    scale = scaling.attention_factor
    if scale is None:
        scale = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return stretched, scale
