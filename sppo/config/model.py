"""Shape of a model: everything that determines its parameters and its arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from sppo.config.base import MOST_LAYERS, Directory, Layers, Section, Tokens, Width

Family = Literal["llama", "qwen2", "qwen3", "mistral", "gpt2"]

NOT_COMPUTED = frozenset({"preset", "from_hf", "family", "init_std"})
"""Keys of a model that do not change the function that it computes."""


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


class ModelConfig(Section):
    """A decoder-only transformer. ``preset`` or ``from_hf`` supplies fields that are left out."""

    preset: str | None = None
    """Name of a built-in shape. Other fields of this section override the fields of the preset."""
    from_hf: Directory | None = None
    """Directory in the Hugging Face layout with a config.json and weights: the architecture and the
    initial weights."""
    family: Family | None = None
    """Hugging Face family for export; null chooses the first family that computes exactly this
    model."""

    vocab_size: Width
    """Rows of the token embedding; every token id is below this number."""
    hidden_size: Width
    """E: width of the residual stream."""
    num_layers: Layers
    """Number of transformer layers."""
    num_heads: Width
    """N: number of query heads."""
    num_kv_heads: Width | None = None
    """K: number of key/value heads; null means num_heads (multi-head attention)."""
    head_size: Width | None = None
    """D: size of a head; null means hidden_size / num_heads."""
    mlp_size: Width
    """F: width of the MLP."""
    mlp: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    """Activation of the MLP; swiglu has a gate projection in addition to the up projection."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalization before attention, before the MLP and after the last layer."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Number added to the mean square, or to the variance, under the root."""
    position: Literal["rotary", "learned"] = "rotary"
    """Encoding of positions: rotation of q and k, or a table of learned vectors."""
    max_positions: Tokens | None = None
    """Longest context: the rows of the table of learned positions; only informative for rotary
    positions."""
    rope_theta: float = Field(default=10_000.0, ge=1)
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotation to longer contexts; null does not stretch."""
    qk_norm: bool = False
    """RMSNorm over each head of q and k before rotation (Qwen3)."""
    qkv_bias: bool = False
    """Biases of the q, k and v projections."""
    output_bias: bool = False
    """Bias of the attention output projection."""
    mlp_bias: bool = False
    """Biases of the MLP's projections."""
    tie_embeddings: bool = False
    """Whether the vocabulary projection uses the token embedding as its weight."""
    sliding_window: Tokens | None = None
    """Number of keys that a query attends to: the last ones up to the query itself; null means
    all."""
    sliding_window_first_layer: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """First layer with the sliding window; layers below attend to all keys (Qwen2's
    max_window_layers)."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the random initial weights."""

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        heads, hidden = data.get("num_heads"), data.get("hidden_size")
        if not isinstance(heads, int) or heads < 1:
            return data  # refused by itself; derived values would only repeat the problem
        if data.get("num_kv_heads") is None:
            data["num_kv_heads"] = heads
        if data.get("head_size") is None and isinstance(hidden, int) and hidden % heads == 0:
            data["head_size"] = max(hidden // heads, 1)
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        broken = list(self._broken_rules())
        if broken:
            raise ValueError("; ".join(broken))
        return self

    def _broken_rules(self) -> Iterator[str]:
        if self.num_heads % self.kv_heads:
            yield (
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.kv_heads}: "
                "every key/value head serves a whole group of query heads"
            )
        if self.head_size is None:
            yield (
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}: "
                "set head_size explicitly"
            )
        elif self.position == "rotary" and self.head_size % 2:
            yield f"head_size {self.head_size} is odd: rotary positions need pairs"
        if self.position == "learned" and self.max_positions is None:
            yield "learned positions need max_positions: the rows of their table"
        yarn = self.rope_scaling is not None and self.rope_scaling.type == "yarn"
        if yarn and self.rope_theta == 1:
            yield "rope_scaling of type yarn needs rope_theta above 1: at 1 nothing is stretched"
        if self.position == "learned" and self.rope_scaling is not None:
            yield "rope_scaling belongs to rotary positions, this model learns its own"

    @property
    def context_reach(self) -> int | None:
        """Longest context in tokens that positions are stretched to; None if it is not known."""
        scaling = self.rope_scaling
        if scaling is None or self.max_positions is None:
            return self.max_positions
        stretched = (scaling.original_max_positions or self.max_positions) * scaling.factor
        return max(self.max_positions, int(stretched))

    @property
    def kv_heads(self) -> int:
        """K: number of key/value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """D: size of a head."""
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def group_size(self) -> int:
        """Number of query heads per key/value head."""
        return self.num_heads // self.kv_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate projection in addition to the up projection."""
        return self.mlp == "swiglu"

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of `layer` in tokens; None if the layer attends to all keys."""
        return self.sliding_window if layer >= self.sliding_window_first_layer else None
