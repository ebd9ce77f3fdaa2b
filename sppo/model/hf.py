"""Reading and writing of weights in the Hugging Face layout, under SPPO's parameter names."""

from sppo.model.hf_reading import HfWeights, load_hf_weights, open_hf_weights
from sppo.model.hf_writing import (
    DTYPES,
    MAX_SHARD_BYTES,
    SavedWeights,
    save_hf_weights,
)

__all__ = [
    "DTYPES",
    "MAX_SHARD_BYTES",
    "HfWeights",
    "SavedWeights",
    "load_hf_weights",
    "open_hf_weights",
    "save_hf_weights",
]
