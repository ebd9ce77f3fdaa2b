"""Section ``optimizer`` of a run file: AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
import re
from fractions import Fraction as Exact
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from sppo.config.base import MOST_STEPS, ComputeDtype, Fraction, Section, Steps, list_of

_SHARE_PATTERN = r"^\s*([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%\s*$"
_SHARE = re.compile(_SHARE_PATTERN, re.ASCII)


def _steps_or_share(value: object) -> int | str:
    if isinstance(value, int) and 0 <= value <= MOST_STEPS:
        return value
    match = _SHARE.match(value) if isinstance(value, str) else None
    if match is None or Exact(match.group(1)) > 100:
        raise ValueError(
            f"write a number of steps, 0 to {MOST_STEPS}, or a share of all steps, such as 3%"
        )
    return match.group().strip()


StepsOrShare = Annotated[
    int | str,
    BeforeValidator(_steps_or_share),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": MOST_STEPS},
                {"type": "string", "pattern": _SHARE_PATTERN},
            ]
        }
    ),
]
"""Number of steps, or a share of all steps of the schedule: ``200`` or ``3%``."""


def steps_of(value: int | str, *, of: int) -> int:
    """Return the steps that a number or share of `of` steps means; shares are rounded up.

    >>> steps_of("3%", of=1000), steps_of("3%", of=1001), steps_of(200, of=1000)
    (30, 31, 200)
    """
    if isinstance(value, int):
        return value
    return math.ceil(Exact(value.rstrip(" %")) * of / 100)


Decay = Annotated[float, Field(ge=0, lt=1)]


class ParameterGroup(Section):
    """Parameters with a learning rate or a weight decay of their own."""

    match: Annotated[str, Field(min_length=1)]
    """Glob of names such as ``embed.weight``, ``layers.0.q.weight``, ``layers.0.mlp_norm.weight``,
    ``final_norm.weight`` and ``head.weight``, listed by ``sppo config parameters``; ``*`` matches
    dots, too. A glob that matches none that trains is an error."""
    lr: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?x$")] = "1x"
    """Multiple of the learning rate of the schedule: 16x, or 0.1x."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay; null leaves it as it is without the group."""

    @property
    def lr_factor(self) -> float:
        """Factor of the learning rate of the schedule."""
        return float(self.lr.removesuffix("x"))


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=3e-4, ge=0)
    """Learning rate at the peak of the schedule."""
    betas: Annotated[
        tuple[Decay, Decay],
        BeforeValidator(list_of("2 numbers, such as [0.9, 0.95]", length=2)),
    ] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Number added to the square root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of matrices and embeddings; biases and norms have none."""
    moments: ComputeDtype = "fp32"
    """Precision of both moments. bf16 takes 4 bytes a parameter less, 8 instead of 12 with fp32
    weights of the optimizer; the update computes in fp32 and rounds to the nearest. The second
    moment then needs a decay rate of at most about 0.99."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with a learning rate or a weight decay of their own, such as ``[{match: "embed.*",
    lr: 0.1x}]``. The first group whose glob matches a name counts."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate after warm-up. cosine and linear decay from its end on, towards
    ``final_lr_ratio``; constant stays at ``lr``; wsd (warm-up, stable, decay) stays at ``lr`` and
    decays over the last ``decay_steps``."""
    warmup_steps: StepsOrShare = 0
    """Number of steps over which the learning rate rises to ``lr``, or their share of the schedule,
    e.g. 3%."""
    decay_steps: StepsOrShare | None = None
    """Number of steps of the decay of wsd, or their share of the schedule, e.g. 20%; required for
    wsd."""
    decay: Literal["linear", "sqrt", "cosine"] | None = None
    """Form of the decay of wsd, where p rises from 0 to 1. linear: 1 - p; sqrt: 1 - sqrt(p), which
    falls fast at first; cosine: (1 + cos(pi p)) / 2. null: linear."""
    schedule_steps: Steps | None = None
    """Number of steps of the whole schedule, if it is not ``train.steps``: a run may end before the
    schedule does, and after its end the rate stays at its final value."""
    final_lr_ratio: Fraction = 0.0
    """Fraction of ``lr`` at the end of the decay. It is reached one step after the last step, so
    that every step has a rate above 0."""
