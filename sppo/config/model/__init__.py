"""Section ``model`` of a run file: the shape of a model, of its layers and experts, and presets."""

from sppo.config.model.decoder import (
    GATED_ACTIVATIONS,
    NOT_COMPUTED,
    PLAIN_ACTIVATIONS,
    Activation,
    Family,
    ModelConfig,
    upgraded_fields,
)
from sppo.config.model.experts import Experts
from sppo.config.model.layer_type import LayerType, Rotation
from sppo.config.model.linear_attention import LinearAttention
from sppo.config.model.rope_scaling import RopeScaling

__all__ = [
    "GATED_ACTIVATIONS",
    "NOT_COMPUTED",
    "PLAIN_ACTIVATIONS",
    "Activation",
    "Experts",
    "Family",
    "LayerType",
    "LinearAttention",
    "ModelConfig",
    "RopeScaling",
    "Rotation",
    "upgraded_fields",
]
