"""Hugging Face ``config.json`` to and from our model fields. JSON only: no weights, no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_model_fields(directory: Path) -> dict[str, Any]:
    """Fields of :class:`sppo.config.model.ModelConfig` that ``directory/config.json`` describes.

    Raises:
        ValueError: no such file, not a supported family, or a feature this model lacks.
    """
    raise ValueError(f"{directory} holds no config.json")
