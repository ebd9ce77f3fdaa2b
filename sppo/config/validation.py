"""Section ``validation`` of a run file: sets that are evaluated while a run trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from sppo.config.base import Directory, Section, Steps, Tokens

MOST_EVALUATED = 1 << 48
"""Most sequences or samples of a set: more than any token data has."""
HELD_OUT = "held_out"
"""Name of the set that ``data.eval_tokens`` is, if ``validation.sets`` names none."""
Measure = Literal["loss", "accuracy", "exact"]
SetName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=64)]


class ValidationSet(Section):
    """Token data of one set, and how much of it is evaluated."""

    tokens: Directory
    """Directory of held-out tokens, written by ``sppo data prepare``."""
    samples: Literal["stream", "documents"] | None = None
    """Unit of the set, as ``data.samples``, which is the default."""
    sequences: Annotated[int, Field(ge=1, le=MOST_EVALUATED)] | None = None
    """Number of sequences, or samples, from the first on; null evaluates all."""
    length: Tokens | None = None
    """Tokens of a sequence, or of the longest sample; null for ``sequence.length``. Longer
    documents are cut."""


class ValidationConfig(Section):
    """Evaluation of held-out sets on the engine that trains, between steps."""

    every: Steps
    """Number of steps from one validation to the next; the last step is followed by one, too."""
    at_start: bool = True
    """Whether to validate before the first step as well."""
    sets: dict[SetName, ValidationSet] = Field(default_factory=dict)
    """Sets by name; without any, ``data.eval_tokens`` is the set held_out."""
    watch: str | None = None
    """Set that says which weights are best, by its loss; with .accuracy or .exact behind its name,
    such as needle.exact, by that. null watches the first set."""
    keep_best: bool = True
    """Whether the best checkpoint is kept as ``checkpoints/best``, beside the newest
    ``checkpoint.keep``."""
    stop_after: Steps | None = None
    """Number of validations in a row without improvement after which the run ends, with exit code
    0; null never ends it early."""
    min_improvement: float = Field(default=0, ge=0)
    """Least change of what is watched that counts as an improvement."""

    def watched(self, first: str) -> tuple[str, str]:
        """Return the name of the watched set, and what is watched of it.

        Args:
            first: Name of the first set.
        """
        name, _, measure = (self.watch or first).partition(".")
        return name, measure or "loss"
