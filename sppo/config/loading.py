"""Loading and validation of run files with ``section.key=value`` overrides, and of requests."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from sppo.config.base import LONGEST, Section
from sppo.config.huggingface.model_config import model_fields, read_config
from sppo.config.longest_document import longest_document
from sppo.config.model.presets import PRESETS
from sppo.config.problems import MISSING, ConfigError, Problem, nearest, problems_of
from sppo.config.rules import broken_rules
from sppo.config.run import DataConfig, RunConfig
from sppo.config.start_model import changed_shape, model_of_start
from sppo.config.yaml_file import parse_yaml, read_yaml
from sppo.quoting import quoted

_REQUIRED = ("model", "data", "sequence")
_ONLY_IN_PLANS = {"program_digest", "stages"}
"""Keys of a plan that no run file has."""
_IS_A_PLAN = (
    "a plan of sppo solve, not a run file: give the run file it was made of, for sppo train with "
    "--plan FILE; sppo simulate FILE shows the plan"
)
_WRITTEN = "an override is written section.key=value"
_ALTERNATIVES = (
    ("model.preset", "model.from_hf"),
    ("data.tokens", "data.sources"),
    ("train.steps", "train.epochs"),
    ("train.sequences_per_step", "train.samples_per_step", "train.tokens_per_step"),
)
"""Keys of which a run has one: an override of one takes the place of another in the run file."""
_SHAPE = ("vocab_size", "hidden_size", "num_layers", "num_heads", "mlp_size")
"""Keys that are required of a model without preset and from_hf."""


def load_run(
    source: Path | str | Mapping[str, Any] | RunConfig,
    overrides: str | Sequence[str] | Mapping[str, Any] = (),
) -> RunConfig:
    """Read a run configuration, apply overrides and validate it.

    Args:
        source: Path of a run file, its sections as a mapping, or a run to change.
        overrides: Replacements of values of the run: ``section.key=value`` texts with values in
            YAML, as on the command line, or a mapping of ``section.key`` to values. Arrays and
            numbers of numpy are converted to those of Python.

    Raises:
        ConfigError: The run has problems; the error lists all problems of the file and the
            overrides.
        TypeError: ``source`` or ``overrides`` has another type.

    >>> sections = {"model": {"preset": "tiny"}, "data": {"tokens": "data"}}
    >>> run = load_run(sections, {"sequence.length": "4Ki", "optimizer.lr": 1e-3})
    >>> run.sequence.length, run.optimizer.lr
    (4096, 0.001)
    >>> load_run(run, "sequence.length=8Ki").sequence.length
    8192
    """
    if isinstance(overrides, str):
        overrides = (overrides,)
    if not isinstance(overrides, (Mapping, Sequence)) or not all(
        isinstance(word, str) for word in overrides
    ):
        raise TypeError(
            f"overrides={quoted(overrides)}: write section.key=value words, or a mapping of "
            "section.key to values"
        )
    if isinstance(source, (Mapping, RunConfig)):
        sections = run_sections(source) if isinstance(source, RunConfig) else source
        raw, name = _plain(sections), "the run"
    elif isinstance(source, (str, Path)):
        raw, name = _run_file(Path(source)), str(source)
    else:
        raise TypeError(
            f"a run of {quoted(source)}: give the path of a run file, a mapping of its sections, "
            "or a run"
        )
    problems: list[Problem] = []
    merged = apply_overrides(overrides, raw, problems)
    return check_run(merged, source=name, problems=problems)


def _run_file(path: Path) -> dict[str, Any]:
    """Return the sections of a run file, as written.

    Raises:
        ConfigError: The file cannot be read, or is a plan.
    """
    raw = read_yaml(path)
    if raw.keys() >= _ONLY_IN_PLANS:
        raise ConfigError(str(path), [Problem("", "", _IS_A_PLAN)])
    return raw


def run_sections(run: RunConfig) -> dict[str, Any]:
    """Return the sections of `run` as plain values, in the form that :func:`load_run` accepts.

    A key that was left out stays out, so that the solver may still choose its value.
    """
    return run.model_dump(mode="json", exclude_unset=True)


def apply_overrides(
    overrides: Sequence[str] | Mapping[str, Any], raw: dict[str, Any], problems: list[Problem]
) -> dict[str, Any]:
    """Return a copy of `raw` with the overrides applied; faults are added to `problems`.

    An override takes the place of a key in `raw` that says the same in another way: with
    ``model.preset=tiny`` the file's ``model.from_hf`` is left out.
    """
    merged: dict[str, Any] = copy.deepcopy(raw)
    given = list(_given(overrides, problems))
    for path, value in given:
        if value is not None:
            _make_way(merged, path.strip())
    for path, value in given:
        _replace(merged, path, value, problems)
    return merged


def _given(
    overrides: Sequence[str] | Mapping[str, Any], problems: list[Problem]
) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each override; what is none is added to `problems`."""
    if isinstance(overrides, Mapping):
        yield from ((path, _plain(value)) for path, value in overrides.items())
        return
    for word in overrides:
        path, equals, text = word.partition("=")
        if not equals or not all(path.strip().split(".")):
            problems.append(Problem(word, "", _WRITTEN))
            continue
        try:
            value = parse_yaml(text, source=word)
        except ConfigError as error:
            problems.append(Problem(path, quoted(text), error.problems[0].rule))
            continue
        yield path, value


def _make_way(target: dict[str, Any], path: str) -> None:
    """Remove the alternatives of the key at ``a.b``."""
    for keys in _ALTERNATIVES:
        for other in keys if path in keys else ():
            section, _, key = other.partition(".")
            if other != path and isinstance(target.get(section), dict):
                target[section].pop(key, None)


def _plain(value: Any) -> Any:
    """Return a copy of `value` as a run file would have it: paths as text, arrays as lists."""
    if hasattr(value, "tolist"):  # arrays and numbers of numpy and torch
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_plain(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _replace(target: dict[str, Any], path: str, value: Any, problems: list[Problem]) -> None:
    """Write `value` at ``a.b``; if it cannot be written, the reason is added to `problems`."""
    *outer, last = path.strip().split(".")
    if not all((*outer, last)):
        problems.append(Problem(path, quoted(value), _WRITTEN))
        return
    for key in outer:
        if target.get(key) in (None, "auto"):
            target[key] = {}
        if not isinstance(target[key], dict):
            rule = f"{'.'.join(outer)} is a value in the run file: it has no keys"
            problems.append(Problem(path, quoted(value), rule))
            return
        target = target[key]
    target[last] = value


def check_run(
    raw: dict[str, Any],
    *,
    source: str,
    problems: Sequence[Problem] = (),
) -> RunConfig:
    """Validate all sections, and if these are right the rules about several keys.

    Raises:
        ConfigError: The run has problems; the error lists all, including those in `problems`.
    """
    found = list(problems)
    sections: dict[str, Any] = {name: {} for name in _REQUIRED}
    left_out = {name for name in RunConfig.model_fields if raw.get(name) is None}
    sections |= {name: value for name, value in raw.items() if name not in left_out}
    base = _model_of_start(sections, found)
    if isinstance(sections["model"], dict):
        section = sections["model"]
        expanded = expand_model(section, found) if base is None else _overlay(base, section)
        # An unknown model is replaced by any other, so that the other sections are checked.
        sections["model"] = PRESETS["tiny"] if expanded is None else expanded
    data, sequence = sections["data"], sections["sequence"]
    if isinstance(sequence, dict) and sequence.get("length") == LONGEST:
        sections["sequence"] = {**sequence, "length": _longest(data, found)}
    if isinstance(data, dict) and data.get("tokens") is None and data.get("sources") is None:
        rule = "required; or data.sources, for a mixture"
        found.append(Problem("data.tokens", MISSING, rule))
    try:
        run = RunConfig.model_validate(sections)
    except ValidationError as error:
        found += problems_of(error)
    if not found and run.start is not None and base is not None:
        found += changed_shape(run.model, base, run=run.start.from_run)
    if not found:
        found += broken_rules(run)
    if found:
        raise ConfigError(source, found)
    return run


def _model_of_start(sections: dict[str, Any], found: list[Problem]) -> dict[str, Any] | None:
    """Return the model of the run that `sections` start from; None if they start from none.

    If it cannot be read, the reason is added to `found`, and another model takes the place of that
    and of the section, so that the other sections are checked.
    """
    start, train = sections.get("start"), sections.get("train")
    if not isinstance(start, dict):
        return None
    if isinstance(start.get("from_run"), str):
        try:
            output = train.get("output") if isinstance(train, dict) else None
            return model_of_start(start["from_run"], output=output)
        except ValueError as error:
            found.append(Problem("start.from_run", quoted(start["from_run"]), str(error)))
    sections["model"] = {}
    return PRESETS["tiny"]


def _longest(data: object, found: list[Problem]) -> int:
    """Return the length of the longest document of the training data that a section names."""
    rule = ""
    try:
        section = DataConfig.model_validate(data)
        if section.samples == "documents":
            return max(map(longest_document, map(Path, section.directories.values())))
        rule = "a stream has no longest document; write a number, or data.samples=documents"
    except (ValidationError, AssertionError):  # reported with the section
        rule = "of which data? data names none that can be used"
    except (ValueError, OSError) as error:
        rule = f"of which document? {error}"
    found.append(Problem("sequence.length", LONGEST, rule))
    return 1


def expand_model(value: dict[str, Any], found: list[Problem]) -> dict[str, Any] | None:
    """Return the fields of a model section with ``preset`` or ``from_hf`` expanded.

    Fields of the section take precedence. With both, the preset stands in until the directory is
    there.
    """
    preset, directory = value.get("preset"), value.get("from_hf")
    if directory is not None and (preset is None or Path(str(directory)).is_dir()):
        try:
            return _overlay(model_fields(read_config(Path(str(directory)))), value)
        except ValueError as error:
            found.append(Problem("model.from_hf", quoted(directory), str(error)))
            return None
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            near = nearest(preset, PRESETS) if isinstance(preset, str) else ""
            rule = f"no such preset.{near or ' Presets: ' + ', '.join(PRESETS)}"
            found.append(Problem("model.preset", quoted(preset), rule))
            return None
        return _overlay(PRESETS[preset], value)
    if value.keys().isdisjoint(_SHAPE):
        rule = f"required: preset, or from_hf, or the fields {', '.join(_SHAPE)}"
        found.append(Problem("model", MISSING, rule))
        return {**PRESETS["tiny"], **value}
    return value


def _overlay(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return `base` updated by `given`, and fields that depend on a changed field.

    If `base` has as many key/value heads as query heads, so has the result. Another number of
    key/value heads and a head size are kept.
    """
    fields = {**base, **given}
    multi_head = base.get("num_kv_heads") in (None, base.get("num_heads"))
    if multi_head and "num_heads" in given and "num_kv_heads" not in given:
        fields.pop("num_kv_heads", None)
    ours, theirs = given.get("rope_scaling"), base.get("rope_scaling")
    if isinstance(ours, dict) and isinstance(theirs, dict):
        same_type = ours.get("type", theirs["type"]) == theirs["type"]
        fields["rope_scaling"] = {**theirs, **ours} if same_type else ours
    for section in ("experts", "linear_attention"):
        if isinstance(given.get(section), dict):
            fields[section] = {**(base.get(section) or {}), **given[section]}
    return fields


# Requests of a command

Request = TypeVar("Request", bound=Section)


def read_keys(
    request: type[Request], words: Sequence[str], *, defaults: Mapping[str, Any] | None = None
) -> Request:
    """Return the request that ``KEY=VALUE`` words write, with values in YAML.

    Args:
        request: Section whose fields are the keys.
        words: Words of the command line.
        defaults: Values of keys that no word gives, instead of those of the section.

    Raises:
        ConfigError: The request has problems; the error lists all.
    """
    problems: list[Problem] = []
    values = apply_overrides(words, dict(defaults or {}), problems)
    try:
        found = request.model_validate(values)
    except ValidationError as error:
        for problem in problems_of(error, keys={"": sorted(request.model_fields)}):
            key = problem.path.partition(".")[0]  # an entry of a list has the key of the list
            problems.append(replace(problem, path=key))
    if problems:
        raise ConfigError("the request", problems)
    return found
