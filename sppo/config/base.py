"""The strict base of every configuration section, and the value types people write in YAML.

Validators here do no I/O, read no environment and import no torch: checking a file never
starts, changes or downloads anything.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from sppo.units import LARGEST_SIZE, SIZE_PATTERN, parse_size


def _no_tilde(path: str) -> str:
    if path.startswith("~"):
        raise ValueError("~ stands for nothing in a run file: write the whole path")
    return path


LARGEST_FLOAT = 3.4e38
"""Largest number of fp32, in which most of them are used."""

MOST_RANKS = 1 << 20
MOST_SUBSEQUENCES = 1 << 14
"""Each of them is planned and simulated by itself, on every stage."""
MOST_SEQUENCES = 1 << 14
"""Most sequences of one step: each of them is planned by itself."""
MOST_SAMPLES = 1 << 20
"""Most samples of one step: short ones share a sequence."""
MOST_LAYERS = 4096
"""Each of them is planned by itself; thirty times those of the deepest models in use."""
MOST_TOKENS = 1 << 30
"""Most tokens of one sequence: plans count FLOPs, which grow with its square, in floats and 64-bit
numbers."""
MOST_WIDTH = 1 << 24
"""Largest dimension of a weight: the product of two fits 64 bits with room for every layer."""
MOST_STEPS = 10**12
LONGEST_TIMEOUT_S = 200_000
"""Two days; checkpoints wait ten times as long, and timers count 32 bits of milliseconds."""

_SIZE_TEXT = {"type": "string", "pattern": SIZE_PATTERN}

Size = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(ge=0),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, _SIZE_TEXT]}),
]
"""A count of bytes: ``2GiB``, ``512MiB`` or a plain number."""

Tokens = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(ge=1, le=MOST_TOKENS),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _SIZE_TEXT]}),
]
"""A count of tokens, at least one: ``32Ki``, ``4Mi`` or a plain number."""

Directory = Annotated[str, Field(min_length=1), AfterValidator(_no_tilde)]
"""A path as the program opens it: relative to where the command is run, or absolute."""

Degree = Annotated[int, Field(ge=1, le=MOST_RANKS)]
"""A count of ranks, or of things that are dealt out to ranks."""

Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Width = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
"""A dimension of weights."""

Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Frozen, refuses unknown keys, keeps attribute docstrings for the schema."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _number_or_not(cls, value: object, info: ValidationInfo) -> object:
        """Refuse numbers that no machine computes with, and truth, which pydantic reads as 1."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool):
            if field.annotation is not bool:
                raise ValueError("must be a number or a word, not true or false")
        elif isinstance(value, int) and abs(value) > LARGEST_SIZE:
            raise ValueError("must be below 2^63, what 64 bits hold")
        elif isinstance(value, float) and abs(value) > LARGEST_FLOAT:
            raise ValueError(f"must be a finite number up to {LARGEST_FLOAT:g}, what fp32 holds")
        return value
