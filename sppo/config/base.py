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

from sppo.units import SIZE_PATTERN, parse_size


def _no_tilde(path: str) -> str:
    if path.startswith("~"):
        raise ValueError("~ stands for nothing in a run file: write the whole path")
    return path


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
    Field(ge=1),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _SIZE_TEXT]}),
]
"""A count of tokens, at least one: ``32Ki``, ``4Mi`` or a plain number."""

Directory = Annotated[str, Field(min_length=1), AfterValidator(_no_tilde)]
"""A path as the program opens it: relative to where the command is run, or absolute."""

Degree = Annotated[int, Field(ge=1)]
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
    def _truth_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic would read ``steps: true`` as one step."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError("must be a number or a word, not true or false")
        return value
