"""Write the reference pages of the documentation from the code: docs/reference/*.md.

python scripts/reference_pages.py            writes the pages
python scripts/reference_pages.py --check    exits with 1 and names the pages that are stale

Every description is taken from the definition of its subject: fields of the run file's schema,
docstrings, the help of options. The pages do not depend on the machine.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from sppo.output_file import write_text

DIRECTORY = Path(__file__).resolve().parents[1] / "docs/reference"
_GENERATED = "<!-- Written by scripts/reference_pages.py from the code: change it there. -->\n\n"


def run_file_page() -> str:
    """Return the page of all keys of a run file."""
    from sppo.config.examples import EXAMPLES
    from sppo.config.run import RunConfig

    schema = RunConfig.model_json_schema()
    definitions = schema["$defs"]
    lines = [
        "# Run file",
        "A run file is YAML. `model`, `data` and `sequence` are needed, every other key has a "
        "default. On the command line `section.key=value` replaces a value. Sizes and lengths are "
        "numbers, or text such as `32Ki`, `4Mi` or `64GiB`; paths are relative to where the "
        "command runs. `sppo config check` reports all mistakes at once, `sppo config schema` "
        "prints the JSON schema for editors.",
        "A key that is left out is decided by default, or, where the default is `auto`, by the "
        "[solver](../planning.md#what-the-solver-decides).",
    ]
    for section, entry in schema["properties"].items():
        name = _section_name(entry)
        lines += [f"## `{section}`", _prose(entry["description"])]
        lines.append(_prose(definitions[name].get("description", "")))
        needed = () if section == "model" else definitions[name].get("required", ())
        lines += _keys(section, definitions[name]["properties"], needed, EXAMPLES)
        if section == "model":
            scaling = definitions["RopeScaling"]
            lines += ["### Keys of `model.rope_scaling`", _prose(scaling["description"])]
            needed = scaling.get("required", ())
            lines += _keys("model.rope_scaling", scaling["properties"], needed, EXAMPLES)
    lines += ["## Rules across keys", _rules_across_keys()]
    return "\n\n".join(line for line in lines if line)


def _section_name(entry: Mapping[str, Any]) -> str:
    """Return the name of a section's definition in the schema."""
    choices = entry.get("anyOf", [entry])
    return str(next(c["$ref"] for c in choices if "$ref" in c)).rpartition("/")[2]


def _keys(
    section: str,
    properties: Mapping[str, Any],
    needed: Iterable[str],
    examples: Mapping[str, str],
) -> Iterator[str]:
    for key, entry in properties.items():
        path = f"{section}.{key}"
        if path not in examples:
            raise ValueError(f"sppo/config/examples.py: {path} has no example of a value")
        default = "needed" if key in needed else f"default {_default(section, key, entry)}"
        facts = [_type(entry), default, *_bounds(entry), f"example `{path}={examples[path]}`"]
        yield f"#### `{path}`"
        yield _prose(entry["description"])
        yield " · ".join(facts)


def _default(section: str, key: str, entry: Mapping[str, Any]) -> str:
    import json

    if "default" not in entry:
        return "from `preset` or `from_hf`" if section == "model" else "none"
    value = entry["default"]
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _type(entry: Mapping[str, Any]) -> str:
    """Return the type of a key in words."""
    from sppo.units import SIZE_PATTERN

    choices = entry.get("anyOf", [entry])
    is_size = any(choice.get("pattern") == SIZE_PATTERN for choice in choices)
    words = []
    for choice in choices:
        if is_size and choice.get("type") == "integer":
            words.append("size")
        elif choice.get("pattern") != SIZE_PATTERN:
            words.append(_one_type(choice))
    return " or ".join(words)


def _one_type(choice: Mapping[str, Any]) -> str:
    if "$ref" in choice:
        return "mapping"
    if "enum" in choice:
        return "one of " + ", ".join(f"`{value}`" for value in choice["enum"])
    if "const" in choice:
        return f"`{choice['const']}`"
    names = {"string": "text", "boolean": "true or false", "array": "list", "null": "null"}
    kind = str(choice["type"])
    if kind == "array" and "prefixItems" in choice:
        return f"list of {len(choice['prefixItems'])} numbers"
    return names.get(kind, kind)


def _bounds(entry: Mapping[str, Any]) -> Iterator[str]:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    for choice in entry.get("anyOf", [entry]):
        yield from (f"{word} {choice[key]:,}" for key, word in words.items() if key in choice)


def _rules_across_keys() -> str:
    """Return the docstrings of the rules about several keys as a list, in source order."""
    from sppo.config import rules

    found = [
        inspect.getdoc(function)
        for name, function in inspect.getmembers(rules, inspect.isfunction)
        if function.__module__ == rules.__name__ and name.startswith("_") and _yields(function)
    ]
    lines = [inspect.cleandoc(text) for text in found if text]
    ordered = sorted(lines, key=lambda text: inspect.getsource(rules).index(text.split("\n")[0]))
    return "\n".join(f"- {_flat(text)}" for text in ordered)


def _yields(function: Callable[..., Any]) -> bool:
    """Return whether a function is a rule: it yields problems and does not only collect rules."""
    source = inspect.getsource(function)
    return "yield Problem(" in source


def commands_page() -> str:
    """Return the page of all commands with their arguments and options."""
    from sppo.cli.app import SUBCOMMANDS, subcommand

    lines = [
        "# Commands",
        "Every command has `--help` (`-h`). Those with `--json` print one JSON object on standard "
        "output and nothing else. How a command ended is told by its [exit code](exit_codes.md).",
    ]
    for name in SUBCOMMANDS:
        for path, command in _leaves(subcommand(name), f"sppo {name}"):
            lines.append(f"## `{path}`")
            lines += _command(path, command)
    return "\n\n".join(lines)


def _leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        yield from _leaves(child, f"{path} {name}")


def _command(path: str, command: Any) -> Iterator[str]:
    from sppo.cli.command_group import KeyCommand, usage_name
    from sppo.cli.output.key_table import key_rows

    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(
        [path, *(usage_name(a) for a in arguments), *(["[OPTIONS]"] if options else [])]
    )
    yield f"```text\n{usage}\n```"
    yield _help(inspect.cleandoc(command.help or ""))
    if arguments:
        names = [usage_name(a).replace("|", "\\|") for a in arguments]
        rows = [
            f"| `{name}` | {_flat(a.help or '')} |"
            for name, a in zip(names, arguments, strict=True)
        ]
        yield "\n".join(["| argument | |", "|---|---|", *rows])
    if options:
        hints = get_type_hints(command.callback)
        rows = [
            f"| {_option(o, hints[o.name])} | {_flat(o.help or '')}{_shown_default(o)} |"
            for o in options
        ]
        yield "\n".join(["| option | |", "|---|---|", *rows])
    if isinstance(command, KeyCommand):
        yield _wide_table(
            ("key", "default", ""), [(f"`{key}`", *row) for key, *row in key_rows(command.keys())]
        )


def _help(text: str) -> str:
    """Return a docstring as paragraphs, with its commands as text blocks."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.replace("\b", "")):
        lines = [line.strip() for line in block.strip().splitlines()]
        if lines and all(line.startswith("sppo ") for line in lines):
            blocks.append("```text\n" + "\n".join(lines) + "\n```")
        elif lines:
            blocks.append(_prose(" ".join(lines)))
    return "\n\n".join(blocks)


def _option(option: Any, hint: Any) -> str:
    """Return the names of an option, the long one first, and its value."""
    words = ", ".join(f"`{word}`" for word in sorted(option.opts, key=len, reverse=True))
    if option.is_flag:
        return words
    return f"{words} `{option.metavar or _value(hint)}`".replace("|", "\\|")


def _value(hint: Any) -> str:
    """Return the value of an option of a type: the type in capitals, or the choices."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] or [hint]
    kind: Any = kinds[0] if isinstance(kinds[0], type) else get_args(kinds[0])[0]
    if issubclass(kind, Enum):
        return "|".join(str(choice.value) for choice in kind)
    names = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}
    return next(name for base, name in names.items() if issubclass(kind, base))


def _shown_default(option: Any) -> str:
    default = option.default
    if option.required:
        return " Needed."
    if option.is_flag or default is None or callable(default) or not option.show_default:
        return ""
    value = getattr(default, "value", default)
    return f" [default: {value}]"


def files_page() -> str:
    """Return the page of the fields of the files that a run writes."""
    from sppo.activations.subsequence_placement import SubsequencePlacement
    from sppo.cost.memory.stage_memory import MemoryBuckets, StageMemory
    from sppo.cost.state_tiers import StateTiers
    from sppo.planning.plan import ExecutionPlan, Prediction, StagePlan
    from sppo.report.metrics import StepMetrics
    from sppo.report.run_summary import SUMMARY_FIELDS

    lines = [
        "# Files that a run writes",
        "All lie in `train.output`. What each is for, with `loss.png`, the timelines and the "
        "checkpoints, is said in [read the output](../howto/read_output.md). Units stand at the "
        "end of names: `_s` seconds, `_bytes`, `_tokens`, `_per_s`.",
        "## metrics.jsonl",
        f"One JSON object a step. {_summary(StepMetrics)} null stands for what is unknown.",
        _fields_table(StepMetrics),
        "## run_summary.json",
        "Written at the end of a run. `predicted` and `measured` stand beside each other.",
        _table(SUMMARY_FIELDS.items()),
        "## plan.json",
        f"The plan that is run, and what `sppo solve -o` writes. {_summary(ExecutionPlan)}",
        _fields_table(ExecutionPlan),
    ]
    for title, cls in (
        ("stages[]", StagePlan),
        ("stages[].subsequences[]", SubsequencePlacement),
        ("stages[].memory", StageMemory),
        ("stages[].memory.device", MemoryBuckets),
        ("predicted", Prediction),
        ("state", StateTiers),
    ):
        lines += [f"### `{title}`", _summary(cls), _fields_table(cls)]
    return "\n\n".join(lines)


def _summary(cls: type) -> str:
    """Return the first paragraph of a docstring."""
    return _prose((inspect.getdoc(cls) or "").split("\n\n")[0])


def _fields_table(cls: type) -> str:
    from dataclasses import fields

    described = {**_google_attributes(cls), **_attribute_docstrings(cls)}
    missing = [field.name for field in fields(cls) if field.name not in described]
    if missing:
        raise ValueError(f"{cls.__name__}: {', '.join(missing)}: no description; write a docstring")
    aliases = _aliases(cls)
    null = {name: re.sub(r"\bNone\b", "null", text) for name, text in described.items()}
    return _table((aliases.get(f.name, f.name), null[f.name]) for f in fields(cls))


def _aliases(cls: type) -> dict[str, str]:
    """Return the names of fields in files, if they differ from the names in the code."""
    found = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        for extra in getattr(hint, "__metadata__", ()):
            if getattr(extra, "alias", None):
                found[name] = str(extra.alias)
    return found


def _attribute_docstrings(cls: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, by field."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef), f"{cls} is a class"
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = inspect.cleandoc(str(below.value.value))
    return found


def _google_attributes(cls: type) -> dict[str, str]:
    """Return the entries of a docstring's section ``Attributes:``, by name."""
    _, _, text = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: _flat(description) for name, description in entries}


def policies_page() -> str:
    """Return the page of activation policies."""
    from sppo.activations import policy, tensor_classes

    cells = [(f"`{name}`", *words) for name, words in policy.DESCRIPTIONS.items()]
    return "\n\n".join(
        [
            "# Activation policies",
            "`activations.policy` says what becomes of saved tensors between forward and backward. "
            "`auto`, the default, is `hybrid`; where everything fits that is `retain`. How to "
            "think of them: [subsequences and the two-level "
            "policy](../explanation/subsequences.md).",
            _wide_table(("policy", "retains", "offloads", "recomputes in backward"), cells),
            _docstring_page(policy),
            "## Classes of tensors",
            _docstring_page(tensor_classes),
        ]
    )


def _docstring_page(module: Any) -> str:
    """Return a module's docstring without its first paragraph, as Markdown."""
    _, _, text = inspect.cleandoc(module.__doc__ or "").partition("\n\n")
    blocks = []
    for block in text.split("\n\n"):
        if block.startswith("    "):
            blocks.append("```text\n" + textwrap.dedent(block) + "\n```")
        elif block.startswith("- "):
            items = re.split(r"\n(?=- )", block)
            blocks.append("\n".join(f"- {_prose(item[2:])}" for item in items))
        else:
            blocks.append(_prose(block))
    return "\n\n".join(blocks)


def schedules_page() -> str:
    """Return the page of schedules."""
    from sppo.schedule.orders.names import (
        DESCRIPTIONS,
        WHOLE_SEQUENCES,
        WITH_VIRTUAL_STAGES,
        schedule_names,
    )

    cells = [
        (
            f"`{name}`",
            DESCRIPTIONS[name],
            "whole sequences" if name in WHOLE_SEQUENCES else "subsequences",
            "several" if name in WITH_VIRTUAL_STAGES else "one",
        )
        for name in DESCRIPTIONS
    ]
    return "\n\n".join(
        [
            "# Schedules",
            "`parallel.schedule` and `sppo simulate schedule=NAME` take these names; `auto` is the "
            "fastest one simulated. [Schedules, with drawn examples](../explanation/schedules.md) "
            "says how to read them, [add a schedule](../howto/schedule.md) how to write one.",
            _wide_table(("name", "order", "units", "stages on a rank"), cells),
            "## What they are worth",
            "*Simulated*: four ranks; a forward of a unit on a stage takes 1 and each half of its "
            "backward 1, where a rank has two stages, and twice that where it has one; messages "
            "are free. One sequence of eight subsequences, and four sequences of two. Schedules of "
            "whole sequences run each sequence as one unit. Idle is the share of all ranks' time; "
            "memory is that of the fullest rank, in what the forward of a unit leaves on all of a "
            "rank's layers.",
            _simulated_table(schedule_names()),
        ]
    )


def _simulated_table(names: Iterable[str]) -> str:
    from sppo.schedule.abstract import AbstractCase, compared_case
    from sppo.schedule.simulation.simulate import simulate

    rows = []
    for name in names:
        cells: list[str] = []
        for sequences, subsequences in ((1, 8), (4, 2)):
            request = AbstractCase(
                schedule="looped_bfs",
                ranks=4,
                virtual=2,
                sequences=sequences,
                subsequences=subsequences,
                backward=1,
                weight=1,
            )
            case = compared_case(request, name=name)
            timeline = simulate(case.schedule, costs=case.costs)
            peak = max(track.memory["total"].peak_bytes for track in timeline.ranks)
            step, idle = timeline.makespan_s, timeline.bubble_fraction
            cells += [f"{step:.4g}", f"{idle:.1%}", f"{peak / 2:.3g}"]
        rows.append((f"`{name}`", *cells))
    header = ("name", "1 x 8: step", "idle", "memory", "4 x 2: step", "idle", "memory")
    return _wide_table(header, rows)


def presets_page() -> str:
    """Return the page of named models and machines."""
    from sppo.hardware.presets import PRESETS as MACHINES

    return "\n\n".join(
        [
            "# Presets",
            "## Models",
            "`model.preset`. Shapes as published in each model's own config.json; `gpt-*` are "
            "those of the SPPO paper with rotary positions, `tiny*` byte-level ones for a laptop. "
            "Fields given beside a preset replace its own.",
            _models_table(),
            "## Machines",
            "`hardware.preset`, with `nodes` and `devices_per_node`. All figures are *analytic*, "
            "those of vendors and others; rates that plans use, and their sources, stand in "
            "[planning](../planning.md#rates-of-presets).",
            _wide_table(
                ("preset", "kind", "memory", "of it usable", "bf16 peak", "a node", "behind it"),
                [_machine_row(spec) for spec in MACHINES.values()],
            ),
        ]
    )


def _models_table() -> str:
    from sppo.config.model import ModelConfig
    from sppo.config.presets import PRESETS
    from sppo.cost.parameters import num_parameters
    from sppo.units import format_count

    rows = []
    for name, fields in PRESETS.items():
        model = ModelConfig(**fields)
        heads = f"{model.num_heads} / {model.kv_heads} x {model.head_dim}"
        rows.append(
            (
                f"`{name}`",
                format_count(num_parameters(model)),
                str(model.num_layers),
                str(model.hidden_size),
                heads,
                str(model.mlp_size),
                str(model.vocab_size),
                str(model.max_positions),
            )
        )
    header = "preset", "parameters", "layers", "hidden", "heads / K/V x size", "MLP", "words"
    return _wide_table((*header, "positions"), rows)


def _machine_row(spec: Any) -> tuple[str, ...]:
    from sppo.units import format_bytes

    device, node = spec.device, spec.node
    behind = (
        f"{format_bytes(node.host_memory_bytes)} of host memory"
        if node.host_memory_bytes
        else f"{format_bytes(node.disk_bytes)} of disk"
    )
    return (
        f"`{spec.name}`",
        device.kind,
        format_bytes(device.memory_bytes),
        format_bytes(device.usable_bytes),
        f"{device.bf16_flops_per_s / 1e12:g} TFLOP/s",
        f"{node.num_devices} device{'s' * (node.num_devices > 1)}",
        behind,
    )


def exit_codes_page() -> str:
    """Return the page of exit codes."""
    from sppo.cli.exit_codes import MEANINGS

    return "\n\n".join(
        [
            "# Exit codes",
            _wide_table(
                ("code", "meaning"), [(f"`{code}`", text) for code, text in MEANINGS.items()]
            ),
            "Of a job of several ranks it is that of the rank that broke it. Errors go to standard "
            "error, as one message that names the value, the rule and the fix. The first SIGINT or "
            "SIGTERM saves before a training ends; a second one ends it unsaved, once the "
            "operation under way returns. [When a run fails](../howto/failures.md) has the "
            "messages.",
        ]
    )


def python_page() -> str:
    """Return the page of the Python interface."""
    sys.path.insert(0, str(Path(__file__).parent))
    from python_reference import python_page as made  # beside this file

    return made()


PAGES: Mapping[str, Callable[[], str]] = {
    "run_file.md": run_file_page,
    "commands.md": commands_page,
    "files.md": files_page,
    "policies.md": policies_page,
    "schedules.md": schedules_page,
    "presets.md": presets_page,
    "exit_codes.md": exit_codes_page,
    "python.md": python_page,
}
"""Function that makes each page, by file name."""


def page(name: str) -> str:
    """Return the whole text of a page."""
    return _GENERATED + PAGES[name]().rstrip() + "\n"


def stale(directory: Path = DIRECTORY) -> list[str]:
    """Return the names of pages that differ from what the code would generate."""
    return [
        name
        for name in PAGES
        if not (directory / name).is_file()
        or (directory / name).read_text(encoding="utf-8") != page(name)
    ]


def _flat(text: str) -> str:
    """Return text in one line for a table cell, with stars and bars escaped."""
    parts = _prose(text).replace("|", "\\|").split("`")
    return "`".join(p if i % 2 else p.replace("*", "\\*") for i, p in enumerate(parts))


def _prose(text: str) -> str:
    """Return the text of a docstring as one line of Markdown."""
    text = re.sub(r":(?:class|func|meth|data|mod):`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"\s+", " ", text.replace("``", "`")).strip()


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return _wide_table(("field", "meaning"), [(f"`{name}`", _flat(text)) for name, text in rows])


def _wide_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(header)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    """Write the pages, or check them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing, name stale pages")
    if parser.parse_args().check:
        names = stale()
        for name in names:
            print(f"docs/reference/{name} is stale: python scripts/reference_pages.py")
        return 1 if names else 0
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        write_text(DIRECTORY / name, page(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
