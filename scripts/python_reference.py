"""Reference page of the Python interface, from docstrings and signatures of ``sppo.__all__``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

_GROUPS = {
    "Runs and plans": ("load_run", "solve", "estimate", "simulate", "save_plan", "load_plan"),
    "Training and evaluation": ("train", "trained_run", "TrainedRun", "evaluate"),
    "The engine, for a loop of one's own": (
        "Engine",
        "SequenceData",
        "initial_weights",
        "zero_gradients",
    ),
    "What functions take and return": (
        "RunConfig",
        "ExecutionPlan",
        "Timeline",
        "StepMetrics",
    ),
    "Errors": ("ConfigError", "NothingFitsError", "RunFailedError"),
}
_METHODS = {"Engine": ("accumulate", "evaluate", "take_peaks", "close")}
"""Public methods of classes."""
_ELSEWHERE = {
    "RunConfig": "Its sections and keys are those of a [run file](run_file.md).",
    "StepMetrics": "Its fields are those of [`metrics.jsonl`](files.md).",
    "ExecutionPlan": "Its fields are those of [`plan.json`](files.md).",
}
_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Yields):$", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\S[^:\n]*): ", re.MULTILINE)


def python_page() -> str:
    """Return the page of the Python interface.

    Raises:
        ValueError: A name of ``sppo.__all__`` is in no group, or a group has an unknown name.
    """
    import sppo

    grouped = {name for names in _GROUPS.values() for name in names}
    different = grouped ^ (set(sppo.__all__) - {"__version__"})
    if different:
        raise ValueError(f"scripts/python_reference.py: {', '.join(sorted(different))}")
    lines = [
        "# Python interface",
        "`import sppo` offers these names; each loads what it needs when it is first used, and "
        "planning never loads torch. [Use it from Python](../howto/python.md) shows them at work. "
        "What is not listed here may change without notice.",
    ]
    for title, names in _GROUPS.items():
        lines.append(f"## {title}")
        for name in names:
            lines += _entry(name, getattr(sppo, name))
    return "\n\n".join(lines)


def _entry(name: str, value: Any) -> Iterator[str]:
    """Yield heading, signature and docstring of a name, and of its public methods."""
    yield f"### `sppo.{name}`"
    if not inspect.isclass(value):
        yield _signature(f"sppo.{name}", value)
    elif name in _METHODS:
        yield _signature(f"sppo.{name}", value.__init__)
    yield from _docstring(value)
    if name in _ELSEWHERE:
        yield _ELSEWHERE[name]
        return
    if inspect.isclass(value) and dataclasses.is_dataclass(value):
        yield from _properties(value)
    for method in _METHODS.get(name, ()):
        yield f"#### `sppo.{name}.{method}`"
        yield _signature(method, getattr(value, method))
        yield from _docstring(getattr(value, method))


def _properties(cls: type) -> Iterator[str]:
    """Yield a list of the properties of a class."""
    found = inspect.getmembers(cls, lambda value: isinstance(value, property))
    if found:
        yield "\n".join(
            f"- `{name}`: {_flat((inspect.getdoc(value) or '').split(chr(10) * 2)[0])}"
            for name, value in found
        )


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Return a call with parameters, types and defaults; a long one with one parameter per line."""
    parameters = [
        re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(parameter)).replace("'", "")
        for key, parameter in inspect.signature(function).parameters.items()
        if key != "self"
    ]
    kinds = [p.kind for k, p in inspect.signature(function).parameters.items() if k != "self"]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returned = str(function.__annotations__.get("return", "None")).strip("'")
    line = f"{name}({', '.join(parameters)}) -> {returned}"
    if len(line) > 88:
        line = f"{name}(\n" + "".join(f"    {text},\n" for text in parameters) + f") -> {returned}"
    return f"```text\n{line}\n```"


def _docstring(value: Any) -> Iterator[str]:
    """Yield a docstring in Markdown: text, lists for its sections, and examples."""
    text = inspect.getdoc(value) or ""
    text, examples = _without_examples(text)
    head, *rest = _SECTION.split(text)
    yield from (_flat(paragraph) for paragraph in head.strip().split("\n\n") if paragraph.strip())
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        yield f"**{title}**"
        entries = [body] if title == "Returns" else _ENTRY.split(body)
        if len(entries) == 1:
            yield _flat(body)
        else:
            pairs = zip(entries[1::2], entries[2::2], strict=True)
            yield "\n".join(f"- `{name}`: {_flat(told)}" for name, told in pairs)
    if examples:
        yield f"```pycon\n{examples}\n```"


def _without_examples(text: str) -> tuple[str, str]:
    """Return a docstring without its examples, and the examples."""
    start = text.find(">>> ")
    return (text, "") if start < 0 else (text[:start].rstrip(), text[start:].rstrip())


def _flat(text: str) -> str:
    """Return text of a docstring as one line of Markdown."""
    text = re.sub(r":(?:class|func|meth|data|mod):`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"\s+", " ", text.replace("``", "`")).strip()
