"""The strict base of every configuration section, and the value types people write in YAML.

Validators here do no I/O, read no environment and import no torch: checking a file never
starts, changes or downloads anything.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sppo.units import parse_size

Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
"""A count of bytes: ``2GiB``, ``512MiB`` or a plain number."""

Tokens = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]
"""A count of tokens, at least one: ``32Ki``, ``4Mi`` or a plain number."""

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
