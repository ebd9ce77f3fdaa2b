"""Section ``model`` of a run file: the shape of a model, of its layers and experts, and presets."""

from sppo.config.model.decoder import (
    NOT_COMPUTED,
    Activation,
    Family,
    ModelConfig,
    upgraded_fields,
)
from sppo.config.model.experts import Experts
from sppo.config.model.layer_type import LayerType
from sppo.config.model.rope_scaling import RopeScaling

__all__ = [
    "NOT_COMPUTED",
    "Activation",
    "Experts",
    "Family",
    "LayerType",
    "ModelConfig",
    "RopeScaling",
    "upgraded_fields",
]
