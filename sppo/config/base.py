"""Strict base class of configuration sections, and value types of run files.

Validators do no I/O, read no environment variables and import no torch: validating a file never
starts, changes or downloads anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from sppo.units import DURATION_PATTERN, LARGEST_SIZE, SIZE_PATTERN, parse_duration, parse_size


def _no_tilde(path: str) -> str:
    if path.startswith("~"):
        raise ValueError("~ stands for nothing in a run file: write the whole path")
    return path


def list_of(what: str, *, length: int | None = None) -> Callable[[object], object]:
    """Return a validator that refuses what is no list, or has another length, as not `what`."""

    def check(value: object) -> object:
        if not isinstance(value, (list, tuple)) or length not in (None, len(value)):
            raise ValueError(f"must be a list of {what}")
        return value

    return check


def comma_list(value: object) -> list[Any]:
    """Return text such as ``1,2,1`` as the list of its entries, and a single value as a list."""
    if isinstance(value, str):
        return [entry.strip() for entry in value.split(",")]
    return list(value) if isinstance(value, (list, tuple)) else [value]


ComputeDtype = Literal["bf16", "fp32"]

LARGEST_FLOAT = 3.4e38
"""Largest accepted number: that of fp32, in which most numbers are used."""

MOST_RANKS = 1 << 20
MOST_SUBSEQUENCES = 1 << 14
"""Most subsequences of one sequence. Each is planned and simulated separately on every stage."""
MOST_SEQUENCES = 1 << 14
"""Most sequences of one step. Each is planned separately."""
MOST_SAMPLES = 1 << 14
"""Most samples of one step. All are packed together, in a time that grows with their square."""
MOST_LAYERS = 4096
"""Most layers of a model: thirty times those of the deepest models in use. Each layer is planned
separately."""
MOST_TOKENS = 1 << 30
"""Most tokens of one sequence. Plans count FLOPs, which grow with the square of the length, in
floats and 64-bit integers."""
MOST_WIDTH = 1 << 24
"""Largest dimension of a weight: the product of two dimensions and the number of layers fits into
64 bits."""
MOST_STEPS = 10**12
LONGEST_TIMEOUT_S = 200_000
"""Longest timeout: two days. Checkpoints wait ten times as long, and timers have 32 bits for
milliseconds."""

_SIZE_TEXT = {"type": "string", "pattern": SIZE_PATTERN}

Size = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(ge=0),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, _SIZE_TEXT]}),
]
"""Number of bytes: ``2GiB``, ``512MiB`` or a plain number."""

Tokens = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(ge=1, le=MOST_TOKENS),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _SIZE_TEXT]}),
]
"""Number of tokens, at least 1: ``32Ki``, ``4Mi`` or a plain number."""

Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(gt=0),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": DURATION_PATTERN},
            ]
        }
    ),
]
"""Seconds: ``50000h``, ``2000d``, ``90s`` or a plain number."""

LONGEST = "longest"
"""Word for the length of the longest document, which is put in its place before validation."""
Length = Annotated[
    Tokens,
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _SIZE_TEXT, {"const": LONGEST}]}),
]
"""Number of tokens of a sequence, or ``longest``."""

Directory = Annotated[str, Field(min_length=1), AfterValidator(_no_tilde)]
"""Path of a directory, absolute or relative to the working directory of the command."""

Degree = Annotated[int, Field(ge=1, le=MOST_RANKS)]
"""Number of ranks, or of things distributed over ranks."""

Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Width = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
"""Dimension of weights."""

Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base class of sections: frozen, no unknown keys, attribute docstrings in the schema."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Raise ValueError with all rules across keys that are broken."""
        broken = list(self._broken_rules())
        if broken:
            raise ValueError("; ".join(broken))
        return self

    def _broken_rules(self) -> Iterator[str]:
        """Yield the rules across keys of the section that its values break, with the way out."""
        yield from ()

    @field_validator("*", mode="before")
    @classmethod
    def _number_or_not(cls, value: object, info: ValidationInfo) -> object:
        """Raise ValueError for numbers out of range, and for booleans where numbers are expected.

        pydantic reads true as 1.
        """
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool):
            if field.annotation is not bool:
                raise ValueError("must be a number or a word, not true or false")
        elif isinstance(value, int) and abs(value) > LARGEST_SIZE:
            raise ValueError("must be below 2^63, what 64 bits hold")
        elif isinstance(value, float) and abs(value) > LARGEST_FLOAT:
            raise ValueError(f"must be a finite number up to {LARGEST_FLOAT:g}, what fp32 holds")
        return value
