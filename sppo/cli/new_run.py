"""Commented run file for a model and data: length and steps from the data, degrees of the solver.

The other values are those that are usual for the kind of training; every one can be replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sppo.api import find_solution, plan_of
from sppo.config import check_run, load_run
from sppo.config.loading import apply_overrides
from sppo.config.model import ModelConfig
from sppo.config.problems import Problem
from sppo.config.run import DEGREES
from sppo.config.yaml_file import format_yaml
from sppo.data.samples.length_stats import DocumentLengths, LengthStats, length_stats
from sppo.data.tokens import open_tokens
from sppo.hardware.run_hardware import hardware_line
from sppo.quoting import one_line
from sppo.units import (
    KIB,
    counted,
    format_bytes,
    format_count,
    format_duration,
    format_tokens,
    parse_size,
)

_EPOCHS_OF_CHATS = 2
_SAMPLES_PER_STEP = 32
_TOKENS_PER_STEP = 512 * KIB
_FEWEST_STEPS = 20
"""A step is made smaller where the data would give fewer steps."""
_SHORTEST_STREAM = 4 * KIB
_EXTENSION = 4
_VALIDATIONS = 10
_COMMENT_COLUMN = 40


class _Value(NamedTuple):
    """Value of a key, and why it is that."""

    value: Any
    why: str = ""


_Sections = dict[str, dict[str, _Value]]


@dataclass(frozen=True, slots=True)
class _Known:
    """What a new run file follows from."""

    model: ModelConfig
    stats: LengthStats
    lengths: DocumentLengths
    length: int | None
    """Length of a sequence that was asked for; None to choose it."""


def new_run_file(
    kind: str, *, model: str, data: Path, held_out: Path | None, overrides: Sequence[str]
) -> str:
    """Return the text of a run file that ``sppo config check`` and ``sppo train`` accept.

    Args:
        kind: sft, pretrain or extend.
        model: Directory of a Hugging Face model, or the name of a preset.
        data: Directory of token data.
        held_out: Token data of a validation; None for none.
        overrides: ``section.key=value`` texts that replace values.

    Raises:
        ValueError: The model or the data cannot be used, or the overrides are wrong.
        NothingFitsError: No plan of the run fits into the memory of the machine.
    """
    if kind not in _MAKERS:
        raise ValueError(f"{one_line(kind)}: no such kind of run; write {', '.join(_MAKERS)}")
    tokens = open_tokens(data)
    stats, lengths = length_stats(tokens), DocumentLengths.of(tokens)
    source = {"from_hf" if Path(model).is_dir() else "preset": model}
    config = load_run(
        {"model": source, "data": {"tokens": str(data)}, "sequence": {"length": 1}}
    ).model
    known = _Known(config, stats, lengths, _asked_length(overrides))
    made = _MAKERS[kind](known)
    steps = made["train"]["steps"].value
    made["model"] = {**{key: _Value(value) for key, value in source.items()}, **made["model"]}
    made["data"] = {"tokens": _Value(str(data), _counts(stats)), **made["data"]}
    made["train"]["output"] = _Value(f"runs/{data.resolve().name}-{kind}")
    if held_out is not None:
        sets = {"held_out": {"tokens": str(held_out), "sequences": _SAMPLES_PER_STEP}}
        made["validation"] = {
            "every": _Value(max(1, steps // _VALIDATIONS), "steps"),
            "sets": _Value(sets),
        }
    plain = {name: {key: one.value for key, one in keys.items()} for name, keys in made.items()}
    problems: list[Problem] = []
    plain = apply_overrides(overrides, plain, problems)
    run = check_run(plain, source="the run file", problems=problems)
    solution = find_solution(run)
    plan = plan_of(solution)
    plain["parallel"] = {
        **plain.get("parallel", {}),
        **{name: getattr(plan, name) for name in DEGREES},
    }
    figures = (
        f"Predicted on {hardware_line(solution.hardware)}: "
        f"{format_duration(plan.predicted.step_s)} a step, "
        f"{format_bytes(plan.predicted.device_peak_bytes)} of memory."
    )
    lines = (f"# {_TITLES[kind]}.", f"# {figures}", *_lines(plain, made))
    hints = (hint for name, hint in _HINTS.items() if name not in plain)
    return "\n".join((*lines, *hints)) + "\n"


def _asked_length(overrides: Sequence[str]) -> int | None:
    """Return the ``sequence.length`` of the overrides; None without a valid one."""
    with suppress(ValueError, TypeError, KeyError):
        return parse_size(apply_overrides(overrides, {}, [])["sequence"]["length"])
    return None


# Kinds


def _sft(known: _Known) -> _Sections:
    """Return the sections of a fine-tuning on whole documents."""
    longest, reach = known.stats.longest, known.model.context_reach
    length = known.length or min(longest, reach or longest)
    samples, _ = known.lengths.up_to(length)
    why = f"of the longest document, {longest} tokens"
    if samples < known.stats.num_documents:
        why = f"{known.stats.num_documents - samples} documents are longer, up to {longest} tokens"
    per_step = _step_size(_SAMPLES_PER_STEP, _EPOCHS_OF_CHATS * samples)
    steps = max(1, math.ceil(_EPOCHS_OF_CHATS * samples / per_step))
    return {
        "model": {},
        "data": {"samples": _Value("documents", "each whole, with its own positions")},
        "sequence": {
            "length": _Value(format_tokens(length), why),
            "longer": _Value("drop" if samples < known.stats.num_documents else "refuse"),
        },
        "optimizer": _optimizer(1e-5),
        "train": {
            "samples_per_step": _Value(per_step),
            "steps": _Value(steps, f"{_EPOCHS_OF_CHATS} epochs of {counted(samples, 'sample')}"),
        },
    }


def _pretrain(known: _Known) -> _Sections:
    """Return the sections of a training on the stream."""
    length = known.length
    why = "as asked for"
    if length is None:
        p99 = known.stats.length_percentiles["p99"]
        wanted = max(_SHORTEST_STREAM, 1 << max(0, p99 - 1).bit_length())
        possible = known.stats.num_tokens // _FEWEST_STEPS
        length = min(wanted, known.model.context_reach or wanted, max(1, _power_below(possible)))
        why = f"99 % of the documents have at most {p99} tokens"
    return {
        "model": {},
        "data": {"samples": _Value("stream", "all documents one after another")},
        "sequence": {"length": _Value(format_tokens(length), why)},
        "optimizer": _optimizer(3e-5 if known.model.from_hf else 3e-4),
        "train": _steps_of_stream(known, length),
    }


def _extend(known: _Known) -> _Sections:
    """Return the sections of a training on longer sequences than the model was trained on."""
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
    if length >= known.stats.num_tokens:
        raise ValueError(
            f"{known.stats.directory} has {known.stats.num_tokens} tokens, too few for one "
            f"sequence of {length}; prepare more, or write sequence.length=N above {reach}"
        )
    _, share = known.lengths.shares_longer(reach)
    return {
        "model": _stretched(model, reach, length),
        "data": {"isolate_documents": _Value(True, "attention stops at document boundaries")},
        "sequence": {
            "length": _Value(
                format_tokens(length),
                f"{share:.0%} of the tokens are in documents longer than {reach}",
            )
        },
        "optimizer": _optimizer(2e-5),
        "train": _steps_of_stream(known, length),
    }


_MAKERS: Mapping[str, Callable[[_Known], _Sections]] = {
    "sft": _sft,
    "pretrain": _pretrain,
    "extend": _extend,
}
_TITLES: Mapping[str, str] = {
    "sft": "Fine-tuning on whole documents, such as conversations",
    "pretrain": "Training on the stream of all documents",
    "extend": "Training on longer sequences than the model knows",
}


def _stretched(model: ModelConfig, reach: int, length: int) -> dict[str, _Value]:
    """Return the keys that stretch rotary positions from `reach` to `length`."""
    scaling, factor = model.rope_scaling, length / reach
    if scaling is None or scaling.type == "yarn":
        original = (scaling and scaling.original_max_positions) or model.max_positions or reach
        yarn = {
            "type": "yarn",
            "factor": round(length / original, 4),
            "original_max_positions": original,
        }
        return {"rope_scaling": _Value(yarn, f"{factor:g} times {format_tokens(reach)} positions")}
    exponent = model.head_dim / (model.head_dim - 2)
    theta = _Value(
        float(f"{model.rope_theta * factor**exponent:.3g}"),
        f"{factor:g} times {format_tokens(reach)} positions, by the rule NTK-aware",
    )
    return {"rope_theta": theta, "max_positions": _Value(length)}


def _optimizer(lr: float) -> dict[str, _Value]:
    return {
        "lr": _Value(lr),
        "schedule": _Value("cosine"),
        "warmup_steps": _Value("3%", "of the steps"),
        "final_lr_ratio": _Value(0.1),
    }


def _steps_of_stream(known: _Known, length: int) -> dict[str, _Value]:
    """Return the size and the number of steps of one epoch of the stream."""
    sequences = max(1, known.stats.num_tokens // length)
    per_step = _step_size(_TOKENS_PER_STEP // length, sequences)
    return {
        "sequences_per_step": _Value(per_step, f"{format_count(per_step * length)} tokens"),
        "steps": _Value(sequences // per_step, f"an epoch of {counted(sequences, 'sequence')}"),
    }


def _step_size(usual: int, number: int) -> int:
    """Return the size of a step of `number` sequences or samples: a power of two, up to `usual`."""
    return max(1, _power_below(min(usual, number // _FEWEST_STEPS)))


def _power_below(number: int) -> int:
    """Return the largest power of two up to `number`, and 0 for 0."""
    return 1 << number.bit_length() >> 1


def _counts(stats: LengthStats) -> str:
    """Return the size of the data, and which labels count, as text."""
    counting = "all labels count"
    if stats.has_loss_mask:
        counting = f"{stats.num_counting_labels / max(1, stats.num_tokens):.0%} of the labels count"
    documents = counted(stats.num_documents, "document")
    return f"{documents}, {format_count(stats.num_tokens)} tokens, {counting}"


# Text

_HINTS = {
    "validation": "# validation: {every: 50, sets: {held_out: {tokens: DIR, sequences: 32}}}",
    "track": "# track: {to: wandb}  # or tensorboard, trackio, mlflow",
}
"""Lines for sections that a run file might have."""


def _lines(plain: dict[str, Any], made: _Sections) -> Iterator[str]:
    """Yield the lines of a run file; values that were replaced have no comment."""
    for name, section in plain.items():
        if not isinstance(section, dict):
            yield f"{name}: {_flow(section)}"
            continue
        yield f"{name}:"
        for key, value in section.items():
            text = f"  {key}: {_flow(value)}"
            known = made.get(name, {}).get(key)
            why = known.why if known is not None and str(known.value) == str(value) else ""
            yield f"{text:<{_COMMENT_COLUMN}}# {why}" if why else text


def _flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_flow, value))}]"
    return format_yaml({"key": value}).removeprefix("key: ").rstrip("\n")
