"""Sections of a new run file by its kind, with a reason for each value that follows from the data.

The other values are those that are usual for the kind of training; every one can be replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sppo.config.base import LONGEST
from sppo.config.model import ModelConfig
from sppo.data.samples.length_stats import DocumentLengths, LengthStats
from sppo.units import KIB, counted, format_count, format_tokens

SAMPLES_PER_STEP = 32
_EPOCHS_OF_CHATS = 2
_TOKENS_PER_STEP = 512 * KIB
_FEWEST_STEPS = 20
"""A step is made smaller where the data would give fewer steps."""
_SHORTEST_STREAM = 4 * KIB
_EXTENSION = 4


class Value(NamedTuple):
    """Value of a key, and why it is that."""

    value: Any
    why: str = ""


Sections = dict[str, dict[str, Value]]
_Made = tuple[Sections, int]
"""Sections, and the number of steps."""


@dataclass(frozen=True, slots=True)
class Known:
    """Model, data and length from which the sections of a new run file follow."""

    model: ModelConfig
    stats: LengthStats
    lengths: DocumentLengths
    num_tokens: int
    """Number of tokens of the stream."""
    length: int | None
    """Length of a sequence that was asked for; None to choose it."""


def _sft(known: Known) -> _Made:
    """Return the sections of a fine-tuning on whole documents, and its steps."""
    stats, reach = known.stats, known.model.context_reach
    length = known.length or min(stats.longest, reach or stats.longest)
    samples, _ = known.lengths.up_to(length)
    if samples < stats.num_documents:
        longer = counted(stats.num_documents - samples, "longer document")
        why = f"without {longer} of up to {stats.longest} tokens"
        sequence = {"length": Value(format_tokens(length), why), "longer": Value("drop")}
    else:
        sequence = {"length": Value(LONGEST, f"document: {stats.longest} tokens")}
    per_step = _step_size(SAMPLES_PER_STEP, _EPOCHS_OF_CHATS * samples)
    steps = math.ceil(_EPOCHS_OF_CHATS * samples / per_step)
    made = {
        "model": {},
        "data": {"samples": Value("documents", "each whole, with its own positions")},
        "sequence": sequence,
        "optimizer": _optimizer(1e-5),
        "train": {
            "samples_per_step": Value(per_step),
            "epochs": Value(_EPOCHS_OF_CHATS, counted(steps, "step")),
        },
    }
    return made, steps


def _pretrain(known: Known) -> _Made:
    """Return the sections of a training on the stream, and its steps."""
    length, why = known.length, ""
    if length is None:
        p99 = known.stats.length_percentiles["p99"]
        wanted = max(_SHORTEST_STREAM, 1 << max(0, p99 - 1).bit_length())
        possible = _power_below((known.num_tokens - 1) // _FEWEST_STEPS)
        length = min(wanted, known.model.context_reach or wanted, max(1, possible))
        why = f"99 % of the documents have at most {p99} tokens"
    train, steps = _epoch_of_stream(known, length)
    made = {
        "model": {},
        "data": {"samples": Value("stream", "all documents one after another")},
        "sequence": {"length": Value(format_tokens(length), why)},
        "optimizer": _optimizer(3e-5 if known.model.from_hf else 3e-4),
        "train": train,
    }
    return made, steps


def _extend(known: Known) -> _Made:
    """Return the sections of a training beyond the positions of the model, and its steps."""
    model, reach = known.model, known.model.context_reach
    if model.position != "rotary" or reach is None:
        raise ValueError(
            "extend needs rotary positions and a model that says how many it was trained on "
            "(max_position_embeddings); train a model like this one with sppo config new pretrain"
        )
    length = known.length or _EXTENSION * reach
    if length <= reach:
        raise ValueError(
            f"sequence.length {length}: the model reaches {reach} positions already; write more, "
            "or make a file with sppo config new pretrain"
        )
    if length >= known.num_tokens:
        raise ValueError(
            f"{known.stats.directory} has {known.num_tokens} tokens, too few for one sequence of "
            f"{length}; prepare more, or write sequence.length=N above {reach}"
        )
    _, share = known.lengths.shares_longer(reach)
    longer = f"{share:.0%} of the tokens are in documents longer than {reach}"
    train, steps = _epoch_of_stream(known, length)
    made = {
        "model": _stretched(model, reach, length),
        "data": {"isolate_documents": Value(True, "attention stops at document boundaries")},
        "sequence": {"length": Value(format_tokens(length), longer)},
        "optimizer": _optimizer(2e-5),
        "train": train,
    }
    return made, steps


KINDS: Mapping[str, tuple[str, Callable[[Known], _Made]]] = {
    "sft": ("Fine-tuning on whole documents, such as conversations", _sft),
    "pretrain": ("Training on the stream of all documents", _pretrain),
    "extend": ("Training on longer sequences than the model knows", _extend),
}
"""Title, and function that makes the sections, of each kind of run file."""


def _stretched(model: ModelConfig, reach: int, length: int) -> dict[str, Value]:
    """Return the keys that stretch rotary positions from `reach` to `length`."""
    scaling, factor = model.rope_scaling, length / reach
    why = f"{factor:g} times {format_tokens(reach)} positions"
    if scaling is None or scaling.type == "yarn":
        original = (scaling and scaling.original_max_positions) or model.max_positions or reach
        yarn = {"type": "yarn", "factor": length / original, "original_max_positions": original}
        return {"rope_scaling": Value(yarn, why)}
    exponent = model.head_dim / (model.head_dim - 2)
    theta = float(f"{model.rope_theta * factor**exponent:.3g}")
    return {
        "rope_theta": Value(theta, f"{why}, by the rule NTK-aware"),
        "max_positions": Value(length),
    }


def _optimizer(lr: float) -> dict[str, Value]:
    return {
        "lr": Value(lr),
        "schedule": Value("cosine"),
        "warmup_steps": Value("3%", "of the steps"),
        "final_lr_ratio": Value(0.1),
    }


def _epoch_of_stream(known: Known, length: int) -> tuple[dict[str, Value], int]:
    """Return the keys of one epoch of the stream, and its steps."""
    sequences = max(1, (known.num_tokens - 1) // length)
    per_step = _step_size(_TOKENS_PER_STEP // length, sequences)
    steps = math.ceil(sequences / per_step)
    train = {
        "sequences_per_step": Value(per_step, f"{format_count(per_step * length)} tokens"),
        "epochs": Value(1, counted(steps, "step")),
    }
    return train, steps


def _step_size(usual: int, number: int) -> int:
    """Return the size of a step of `number` sequences or samples: a power of two, up to `usual`."""
    return max(1, _power_below(min(usual, number // _FEWEST_STEPS)))


def _power_below(number: int) -> int:
    """Return the largest power of two up to `number`, and 0 for 0."""
    return 1 << number.bit_length() >> 1
