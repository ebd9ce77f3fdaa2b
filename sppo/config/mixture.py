"""Sources of a mixture of token data, and their weights."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from sppo.config.base import Directory, Section


def _is_word(name: str) -> str:
    if not re.fullmatch("[A-Za-z0-9_-]+", name):
        raise ValueError("a name of a source has letters, digits, - and _")
    return name


SourceName = Annotated[str, AfterValidator(_is_word)]


class SourceConfig(Section):
    """One source of a mixture, by its name."""

    tokens: Directory
    """Directory of the source's tokens, written by ``sppo data prepare``."""
    weight: float = Field(gt=0)
    """Share of the source relative to the weights of the others, in the unit ``data.weights``."""
    max_epochs: float = Field(default=4, gt=0)
    """Most epochs of the source over ``train.steps``; a run that needs more is refused before the
    start, with the number that it needs."""


def _by_name(sources: dict[str, SourceConfig]) -> dict[str, SourceConfig]:
    """Sort sources by name, so that their order in a file changes nothing."""
    return dict(sorted(sources.items()))


Sources = Annotated[dict[SourceName, SourceConfig], Field(min_length=1), AfterValidator(_by_name)]
