"""Commented run file for a model and data: length and steps of the data, degrees of the solver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sppo.api import find_solution, plan_of
from sppo.cli.config.new_run_sections import (
    KINDS,
    SAMPLES_PER_STEP,
    Known,
    Sections,
    Value,
)
from sppo.config import check_run, load_run
from sppo.config.loading import apply_overrides
from sppo.config.model.presets import PRESETS
from sppo.config.problems import Problem, nearest
from sppo.config.run import DEGREES
from sppo.config.yaml_file import format_yaml
from sppo.data.samples.length_stats import DocumentLengths, LengthStats, length_stats
from sppo.data.tokens import open_tokens
from sppo.hardware.run_hardware import hardware_line
from sppo.quoting import one_line
from sppo.units import counted, format_bytes, format_count, format_duration, parse_size

_VALIDATIONS = 10
_ADAPTER_LR = 2e-4
_COMMENT_COLUMN = 38
_HINTS = {
    "adapter": "# adapter: {rank: 16}  # trains adapters (LoRA) instead; with optimizer.lr: 2e-4",
    "validation": "# validation: {every: 50, sets: {held_out: {tokens: DIR, sequences: 32}}}",
    "track": "# track: {to: wandb}  # or tensorboard, trackio, mlflow",
}
"""Lines for sections that a run file might have."""


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
    if kind not in KINDS:
        raise ValueError(f"{one_line(kind)}: no such kind of run; write {', '.join(KINDS)}")
    title, make = KINDS[kind]
    asked = _asked(overrides)
    if not Path(model).is_dir() and model not in PRESETS:
        near = nearest(model, PRESETS) or f" Presets: {', '.join(PRESETS)}"
        raise ValueError(f"--model {one_line(model)}: no such directory, and no preset.{near}")
    source = {"from_hf" if Path(model).is_dir() else "preset": model}
    known = _known(source, data, length=_asked_length(asked))
    made, steps = make(known)
    made["model"] = {**{key: Value(value) for key, value in source.items()}, **made["model"]}
    made["data"] = {"tokens": Value(str(data), _counts(known.stats)), **made["data"]}
    made["train"]["output"] = Value(f"runs/{data.resolve().name}-{kind}")
    if held_out is not None:
        made["data"]["eval_tokens"] = Value(str(held_out), "of sppo eval")
        sets = {"held_out": {"tokens": str(held_out), "sequences": SAMPLES_PER_STEP}}
        every = Value(max(1, steps // _VALIDATIONS))
        made["validation"] = {"every": every, "sets": Value(sets)}
    if "adapter" in asked:
        made["optimizer"]["lr"] = Value(_ADAPTER_LR, "about ten times that of whole weights")
        if kind == "extend":
            also = Value(["norms", "embed"], "adapters alone learn longer contexts badly")
            made["adapter"] = {"also_train": also}
    plain = {name: {key: one.value for key, one in keys.items()} for name, keys in made.items()}
    problems: list[Problem] = []
    plain = apply_overrides(overrides, plain, problems)
    solution = find_solution(check_run(plain, source="the run file", problems=problems))
    plan = plan_of(solution)
    degrees = {name: getattr(plan, name) for name in DEGREES}
    plain["parallel"] = {**plain.get("parallel", {}), **degrees}
    figures = (
        f"Predicted on {hardware_line(solution.hardware)}: "
        f"{format_duration(plan.predicted.step_s)} a step, "
        f"{format_bytes(plan.predicted.device_peak_bytes)} of memory."
    )
    lines = (f"# {title}.", f"# {figures}", *_lines(plain, made))
    hints = (hint for name, hint in _HINTS.items() if name not in plain)
    return "\n".join((*lines, *hints)) + "\n"


def _known(source: Mapping[str, str], data: Path, *, length: int | None) -> Known:
    """Return what a run file of a model and data follows from.

    Raises:
        ValueError: The model or the data cannot be used.
    """
    tokens = open_tokens(data)
    run = load_run({"model": source, "data": {"tokens": str(data)}, "sequence": {"length": 1}})
    lengths = DocumentLengths.of(tokens)
    return Known(run.model, length_stats(tokens), lengths, tokens.num_tokens, length)


def _asked(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the sections that overrides give; faults are reported with the run file."""
    sections = apply_overrides(overrides, {}, [])
    return {name: section for name, section in sections.items() if isinstance(section, dict)}


def _asked_length(asked: Mapping[str, Any]) -> int | None:
    """Return the length of a sequence that was asked for; None without a valid one."""
    with suppress(ValueError):
        return parse_size(asked.get("sequence", {}).get("length"))
    return None


def _counts(stats: LengthStats) -> str:
    """Return the size of the data, and which labels count, as text."""
    counting = "all labels count"
    if stats.has_loss_mask:
        counting = f"{stats.num_counting_labels / max(1, stats.num_tokens):.0%} of the labels count"
    documents = counted(stats.num_documents, "document")
    return f"{documents}, {format_count(stats.num_tokens)} tokens, {counting}"


def _lines(plain: Mapping[str, Any], made: Sections) -> Iterator[str]:
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
            yield f"{text:<{_COMMENT_COLUMN}}  # {why}" if why else text


def _flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_flow, value))}]"
    return format_yaml({"key": value}).removeprefix("key: ").rstrip("\n")
