"""Shape of a model: everything that determines its parameters and its arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from sppo.config.base import MOST_LAYERS, Directory, Layers, Section, Tokens, Width
from sppo.config.model.experts import Experts
from sppo.config.model.layer_type import LayerType, Rotation
from sppo.config.model.linear_attention import LinearAttention
from sppo.config.model.rope_scaling import RopeScaling

Family = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gpt2",
    "ministral",
    "smollm3",
    "seed_oss",
    "phi3",
    "granite",
    "arcee",
    "exaone4",
    "olmo2",
    "olmo3",
    "gemma3_text",
    "glm4",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "glm4_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
]
Activation = Literal["swiglu", "swiglu_clamped", "geglu_tanh", "gelu", "gelu_tanh", "relu2"]

_Entry = TypeVar("_Entry")
Pattern = Annotated[tuple[_Entry, ...], Field(min_length=1, max_length=MOST_LAYERS)]
"""Properties of the first layers, repeated over all layers."""

GATED_ACTIVATIONS: tuple[Activation, ...] = ("swiglu", "swiglu_clamped", "geglu_tanh")
"""Activations of an MLP that has a gate projection."""
PLAIN_ACTIVATIONS: tuple[Activation, ...] = ("gelu", "gelu_tanh", "relu2")
"""Activations of the up projection alone."""
_FIRST_WINDOW = "sliding_window_first_layer"
"""Key of runs of earlier versions, in place of ``layer_types``."""

NOT_COMPUTED = frozenset({"preset", "from_hf", "family", "init_std"})
"""Keys of a model that do not change the function that it computes."""


class ModelConfig(Section):
    """A decoder-only transformer. ``preset`` or ``from_hf`` supplies fields that are left out."""

    preset: str | None = None
    """Name of a built-in shape. Other fields of this section override the fields of the preset."""
    from_hf: Directory | None = None
    """Directory in the Hugging Face layout with a config.json and weights: the architecture and the
    initial weights. Beside a ``preset``, it need not be there to plan."""
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
    mlp: Activation = "swiglu"
    """Activation of the MLP. swiglu, swiglu_clamped and geglu_tanh have a gate projection in
    addition to the up projection. swiglu_clamped (gpt-oss): min(g, 7) sigmoid(1.702 min(g, 7))
    (u + 1), with u within -7 and 7."""
    experts: Experts | None = None
    """Mixture of experts in place of the MLP; null for an MLP."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalization in the layers and after the last one."""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Norms of a layer. pre: of the inputs of attention and of the MLP; post: of their outputs,
    before these are added to the residual stream (OLMo 2); both: of inputs and outputs (Gemma,
    GLM-4)."""
    norm_offset: bool = False
    """Whether 1 is added to the weights of all RMSNorms (Gemma)."""
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
    rotary_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the dimensions of each head that is rotated: the first ones."""
    rotary_layers: Pattern[bool] | None = None
    """Which layers rotate q and k, repeated over all layers, such as [true, true, true, false]
    (SmolLM3); null means all."""
    sliding_rope_theta: float | None = Field(default=None, ge=1)
    """Base of the rotary wavelengths in layers with a sliding window, which ``rope_scaling`` then
    does not stretch (Gemma 3); null means that all layers rotate alike."""
    qk_norm: Literal["head", "all"] | None = None
    """RMSNorm of q and k before rotation. head: over each head (Qwen3); all: over all heads at once
    (OLMo 2); null for none."""
    qkv_bias: bool = False
    """Biases of the q, k and v projections."""
    output_bias: bool = False
    """Bias of the attention output projection."""
    mlp_bias: bool = False
    """Biases of the MLP's projections."""
    tie_embeddings: bool = False
    """Whether the vocabulary projection uses the token embedding as its weight."""
    sliding_window: Tokens | None = None
    """Number of keys that a query attends to in layers of type sliding: the last ones up to the
    query itself; null means all."""
    layer_types: Pattern[Literal["full", "sliding", "linear"]] | None = None
    """Attention of the layers, repeated over all layers, such as [sliding, sliding, full]; null
    means sliding everywhere if there is a ``sliding_window``, else full."""
    linear_attention: LinearAttention | None = None
    """Linear attention of layers of type linear (Qwen3-Next, Qwen3.5)."""
    attention_gate: bool = False
    """Whether the outputs of attention are multiplied by the sigmoid of a projection of the token,
    before their own projection (Qwen3-Next, Qwen3.5). Layers of type linear have a gate anyway."""
    attention_scale: float | None = Field(default=None, gt=0)
    """Factor of the attention scores; null means 1 / sqrt(D)."""
    attention_sinks: bool = False
    """Whether each head has a trained logit that takes part in the softmax of the scores and has no
    value (gpt-oss)."""
    embedding_scale: float = Field(default=1.0, gt=0)
    """Factor of the token embeddings, rounded to the compute dtype (Gemma, Granite)."""
    residual_scale: float = Field(default=1.0, gt=0)
    """Factor of the outputs of attention and of the MLP where they are added to the residual
    stream (Granite)."""
    logits_scale: float = Field(default=1.0, gt=0)
    """Factor of the logits (Granite)."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the random initial weights."""

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        data = upgraded_fields(data)
        heads, hidden = data.get("num_heads"), data.get("hidden_size")
        if not isinstance(heads, int) or heads < 1:
            return data  # refused by itself; derived values would only repeat the problem
        if data.get("num_kv_heads") is None:
            data["num_kv_heads"] = heads
        if data.get("head_size") is None and isinstance(hidden, int) and hidden % heads == 0:
            data["head_size"] = max(hidden // heads, 1)
        return data

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
        elif self.position == "rotary" and self.rotary_size % 2:
            yield f"{self.rotary_size} dimensions of a head are rotated: pairs need an even number"
        if self.position == "learned" and self.max_positions is None:
            yield "learned positions need max_positions: the rows of their table"
        yarn = self.rope_scaling is not None and self.rope_scaling.type == "yarn"
        if yarn and self.rope_theta == 1:
            yield "rope_scaling of type yarn needs rope_theta above 1: at 1 nothing is stretched"
        if self.position == "learned" and self.rope_scaling is not None:
            yield "rope_scaling belongs to rotary positions, this model learns its own"
        yield from self._broken_layer_types()
        if self.norm == "layernorm" and self.norm_offset:
            yield "norm_offset belongs to rmsnorm; leave it out, or write norm rmsnorm"
        if self.experts is not None and not self.gated:
            yield f"experts have a gate projection, mlp {self.mlp} has none; use swiglu"

    def _broken_layer_types(self) -> Iterator[str]:
        types = (self.layer_types or ())[: self.num_layers]
        if self.sliding_window is None and "sliding" in (self.layer_types or ()):
            yield "layer_types with sliding need a sliding_window"
        if self.linear_attention is None and "linear" in types:
            yield "layer_types with linear need a section linear_attention"
        if self.linear_attention is not None and "linear" not in types:
            yield "linear_attention belongs to layers of type linear, layer_types have none"
        if set(types) == {"linear"}:
            yield "layer_types need a layer with attention, full or sliding, beside linear ones"

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
        """True if the MLP has a gate projection in addition to the up projection."""
        return self.mlp in GATED_ACTIVATIONS

    @property
    def mlp_inputs(self) -> tuple[str, ...]:
        """Names of the projections that the activation of the MLP reads."""
        return ("gate", "up") if self.gated else ("up",)

    @property
    def norms_inputs(self) -> bool:
        """True if attention and the MLP read norms of the residual stream."""
        return self.norm_placement != "post"

    @property
    def norms_outputs(self) -> bool:
        """True if the outputs of attention and of the MLP are normed before they are added."""
        return self.norm_placement != "pre"

    @property
    def windows(self) -> frozenset[int | None]:
        """Sliding windows of layers with attention; None stands for attention to all keys."""
        types = map(self.layer_type, range(self.num_layers))
        return frozenset(own.window for own in types if not own.linear)

    @property
    def has_windows(self) -> bool:
        """True if some layers have a sliding window."""
        return self.windows != {None}

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with attention, which have keys and values."""
        types = map(self.layer_type, range(self.num_layers))
        return sum(not own.linear for own in types)

    @property
    def rotary_size(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    def experts_of(self, layer_type: LayerType) -> Experts | None:
        """Return the experts of layers of a type; None if they have an MLP."""
        return self.experts if layer_type.routed else None

    def linear_attention_of(self, layer_type: LayerType) -> LinearAttention | None:
        """Return the linear attention of layers of a type; None if they have attention."""
        return self.linear_attention if layer_type.linear else None

    def layer_type(self, layer: int) -> LayerType:
        """Return the type of `layer`; those of equal layers are equal."""
        own = "full" if self.sliding_window is None else "sliding"
        if self.layer_types is not None:
            own = self.layer_types[layer % len(self.layer_types)]
        sliding, linear = own == "sliding", own == "linear"
        rotary = self.position == "rotary" and not linear
        if self.rotary_layers is not None:
            rotary = rotary and self.rotary_layers[layer % len(self.rotary_layers)]
        rotation = Rotation(self.rope_theta, self.rope_scaling is not None)
        if sliding and self.sliding_rope_theta is not None:
            rotation = Rotation(self.sliding_rope_theta, is_scaled=False)
        return LayerType(
            window=self.sliding_window if sliding else None,
            rotation=rotation if rotary else None,
            linear=linear,
            routed=self.experts is not None and layer >= self.experts.dense_layers,
        )


def upgraded_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model that an earlier version has written, as they are written now.

    ``qk_norm`` was true or false; windows were described by the first layer that has one.
    """
    found = dict(fields)
    if isinstance(found.get("qk_norm"), bool):
        found["qk_norm"] = "head" if found["qk_norm"] else None
    if _FIRST_WINDOW not in found:
        return found
    first, layers = found.pop(_FIRST_WINDOW), found.get("num_layers")
    if not isinstance(layers, int):
        return found  # refused by itself
    if not isinstance(first, int) or not 0 <= first <= layers:
        raise ValueError(f"{_FIRST_WINDOW} {first} is no number of the {layers} layers")
    if first:
        found["layer_types"] = ["full"] * first + ["sliding"] * (layers - first)
    return found
