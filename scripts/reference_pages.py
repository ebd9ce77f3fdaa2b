"""Reference pages of the documentation, made from the code.

python scripts/reference_pages.py            writes docs/reference/run_file.md
python scripts/reference_pages.py --check    exits with 1 if that page is stale

The page of the run file is in git; the site is built with the others (scripts/docs_site.py). Every
description is taken from the definition of its subject: fields of the run file's schema,
docstrings, the help of options. The pages do not depend on the machine.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sppo.activations import policy, tensor_classes
from sppo.cli.exit_codes import MEANINGS
from sppo.config import rules
from sppo.config.model import ModelConfig
from sppo.config.model.presets import PRESETS
from sppo.config.run import RunConfig
from sppo.cost.parameters import active_parameters, num_parameters
from sppo.hardware.description import HardwareSpec
from sppo.hardware.presets import PRESETS as MACHINES
from sppo.output_file import write_text
from sppo.schedule.orders.names import DESCRIPTIONS, WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES
from sppo.units import DURATION_PATTERN, SIZE_PATTERN, format_bytes, format_count

RUN_FILE = Path(__file__).resolve().parents[1] / "docs/reference/run_file.md"
_GENERATED = "<!-- Written by scripts/reference_pages.py from the code: change it there. -->\n\n"
_UNITS = {SIZE_PATTERN: "size", DURATION_PATTERN: "duration"}
_ROLE = re.compile(r":(?:class|func|meth|data|mod):`~?([^`]+)`")


def run_file_page() -> str:
    """Return the page of all keys of a run file."""
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
        "[planner](../explanation/planner.md).",
    ]
    for section, entry in schema["properties"].items():
        name = _section_name(entry)
        lines += [f"## `{section}`", _prose(definitions[name]["description"])]
        needed = () if section == "model" else definitions[name].get("required", ())
        lines.append(_keys(section, definitions[name]["properties"], needed))
        for path, inner in _inner_sections(section, definitions[name]["properties"]):
            own = definitions[inner]
            lines += [f"### Keys of `{path}`", _prose(own["description"])]
            lines.append(_keys(path, own["properties"], own.get("required", ())))
    lines += ["## Rules across keys", _rules_across_keys()]
    return _page(*lines)


def _inner_sections(section: str, properties: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield path and definition of each section within a section.

    NAME in a path is what the user names, and N the number of one of a list.
    """
    for key, entry in properties.items():
        for choice in entry.get("anyOf", [entry]):
            named = [
                choice.get("additionalProperties"),
                *choice.get("patternProperties", {}).values(),
            ]
            path = f"{section}.{key}"
            found = {path: [choice], f"{path}.NAME": named, f"{path}.N": [choice.get("items")]}
            for path, inner in found.items():
                for own in inner:
                    if isinstance(own, dict) and "$ref" in own:
                        yield path, str(own["$ref"]).rpartition("/")[2]


def _section_name(entry: Mapping[str, Any]) -> str:
    """Return the name of a section's definition in the schema."""
    choices = entry.get("anyOf", [entry])
    return str(next(c["$ref"] for c in choices if "$ref" in c)).rpartition("/")[2]


def _keys(section: str, properties: Mapping[str, Any], needed: Iterable[str]) -> str:
    """Return the table of the keys of a section."""
    rows = []
    for key, entry in properties.items():
        default = "needed" if key in needed else f"default {_default(section, key, entry)}"
        values = "; ".join([_type(entry), default, *_bounds(entry)])
        rows.append((f"`{section}.{key}`", _flat(entry["description"]), values))
    return _table(("key", "meaning", "values"), rows)


def _default(section: str, key: str, entry: Mapping[str, Any]) -> str:
    if "default" not in entry:
        return "from `preset` or `from_hf`" if section == "model" else "none"
    value = entry["default"]
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _type(entry: Mapping[str, Any]) -> str:
    """Return the type of a key in words."""
    choices = entry.get("anyOf", [entry])
    units = [_UNITS[choice["pattern"]] for choice in choices if choice.get("pattern") in _UNITS]
    words = []
    for choice in choices:
        if units and choice.get("type") in ("integer", "number"):
            words += units
        elif choice.get("pattern") not in _UNITS:
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
    names["object"] = "mapping"
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
    """Return the docstrings of the rules about several keys as a list."""
    return "\n".join(f"- {_flat(inspect.getdoc(rule) or '')}" for rule in rules.RULES)


def commands_page() -> str:
    """Return the page of all commands with their arguments and options, as typer writes it."""
    import typer
    from typer.cli import get_docs_for_click

    from sppo.cli.app import SUBCOMMANDS, app, subcommand
    from sppo.cli.command_group import key_rows

    context = typer.Context(typer.main.get_command(app), info_name="sppo")
    parts = [
        "# Commands",
        "Every command has `--help` (`-h`). Those with `--json` print one JSON object on standard "
        "output and nothing else. The [exit code](exit_codes.md) says how a command ended.",
    ]
    for name in SUBCOMMANDS:
        command = subcommand(name)
        text = get_docs_for_click(obj=command, ctx=context, indent=1, name=name, call_prefix="sppo")
        parts.append(text.strip())
        if keys := getattr(command, "keys", None):
            rows = [(f"`{key}`", *row) for key, *row in key_rows(keys)]
            parts.append(_table(("key", "default", ""), rows))
    # Docstrings lose the indentation of an example if it is all that follows the first line.
    return re.sub(r"\n\n(sppo [^\n]+)\n\n", r"\n\n    \1\n\n", "\n\n".join(parts))


def policies_page() -> str:
    """Return the page of activation policies."""
    return _page(
        "# Activation policies",
        "`activations.policy` says what becomes of saved tensors between forward and backward. "
        "`auto`, the default, is `hybrid`; where everything fits that is `retain`. How to "
        "think of them: [subsequences and the two-level "
        "policy](../explanation/subsequences.md).",
        _details(policy),
        "## Classes of tensors",
        _details(tensor_classes),
    )


def _details(module: Any) -> str:
    """Return a module's docstring without its first paragraph."""
    _, _, text = inspect.cleandoc(module.__doc__ or "").partition("\n\n")
    return _ROLE.sub(r"`\1`", text)


def schedules_page() -> str:
    """Return the page of schedules."""
    cells = [
        (
            f"`{name}`",
            DESCRIPTIONS[name],
            "whole sequences" if name in WHOLE_SEQUENCES else "subsequences",
            "several" if name in WITH_VIRTUAL_STAGES else "one",
        )
        for name in DESCRIPTIONS
    ]
    return _page(
        "# Schedules",
        "`parallel.schedule` and `sppo simulate schedule=NAME` take these names; `auto` is the "
        "fastest one simulated. [Schedules, with drawn examples](../explanation/schedules.md) "
        "says how to read them and what they are worth, [add a "
        "schedule](../howto/schedule.md) how to write one.",
        _table(("name", "order", "units", "stages on a rank"), cells),
    )


def presets_page() -> str:
    """Return the page of named models and machines."""
    return _page(
        "# Presets",
        "## Models",
        "`model.preset`. Shapes as published in each model's own config.json; `gpt-*` are "
        "those of the SPPO paper with rotary positions, `tiny*` byte-level ones for a laptop. "
        "Fields given beside a preset replace its own.",
        _models_table(),
        "## Machines",
        "`hardware.preset`, with `nodes` and `devices_per_node`. All figures are *analytic*, "
        "those of vendors and others.",
        _table(
            ("preset", "kind", "memory", "usable", "bf16 peak", "a node", "offloads to"),
            [_machine_row(spec) for spec in MACHINES.values()],
        ),
        "### Rates",
        "Rates of bf16 that plans use. Products and attention (forward / backward, on long "
        "sequences, by head size) are in TFLOP/s of a device, the others in GB/s in one direction.",
        _table(
            ("preset", "products", "attention", "memory", "host", "in a node", "between nodes"),
            [_rates_row(spec) for spec in MACHINES.values() if spec.device.kind == "cuda"],
        ),
        "### Sources",
        _sources(),
    )


def _rates_row(spec: HardwareSpec) -> tuple[str, ...]:
    device, node, network = spec.device, spec.node, spec.network
    attention = ", ".join(
        f"{row.head_size}: {row.forward_flops_per_s[-1] / 1e12:.0f} / "
        f"{row.backward_flops_per_s[-1] / 1e12:.0f}"
        for row in device.published_rows()
    )
    rates = (
        device.memory_bytes_per_s,
        node.d2h_bytes_per_s,
        network.intra_node_bytes_per_s,
        network.inter_node_bytes_per_s,
    )
    products = f"{device.bf16_flops_per_s * device.gemm_efficiency / 1e12:.0f}"
    return (
        f"`{spec.name}`",
        products,
        f"{device.attention_backend}, {attention}",
        *(f"{rate / 1e9:g}" for rate in rates),
    )


def _sources() -> str:
    """Return the sources of the rates of GPU presets as a list, presets with the same together."""
    presets: dict[tuple[str, str], list[str]] = {}
    for spec in MACHINES.values():
        if spec.device.kind == "cuda":
            attention = dict.fromkeys(row.source for row in spec.device.published_rows())
            found = [*spec.sources.items(), *(("attention", source) for source in attention)]
            for item in sorted(found):
                presets.setdefault(item, []).append(f"`{spec.name}`")
    return "\n".join(
        f"- {figure} ({', '.join(names)}): {source}" for (figure, source), names in presets.items()
    )


def _models_table() -> str:
    rows = []
    for name, fields in PRESETS.items():
        model = ModelConfig(**fields)
        heads = f"{model.num_heads} / {model.kv_heads} x {model.head_dim}"
        parameters, mlp = format_count(num_parameters(model)), str(model.mlp_size)
        if model.experts is not None:
            parameters += f", {format_count(active_parameters(model))} active"
            experts = model.experts
            mlp = f"{experts.per_token} of {experts.count} x {experts.mlp_size}"
        sizes = model.num_layers, model.hidden_size, heads, mlp, model.vocab_size
        rows.append((f"`{name}`", parameters, *map(str, (*sizes, model.max_positions))))
    header = "preset", "parameters", "layers", "hidden", "heads / K/V x size", "MLP", "vocabulary"
    return _table((*header, "positions"), rows)


def _machine_row(spec: HardwareSpec) -> tuple[str, ...]:
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
    return _page(
        "# Exit codes",
        _table(("code", "meaning"), [(f"`{code}`", text) for code, text in MEANINGS.items()]),
        "Of a job of several ranks it is that of the rank that broke it. Errors go to standard "
        "error, as one message that names the value, the rule and the fix. The first SIGINT or "
        "SIGTERM saves before a training ends; a second one ends it unsaved, once the "
        "operation under way returns. [Failures, restarts and resuming](../howto/resume.md) "
        "says after which of them a run goes on.",
    )


PAGES: Mapping[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "policies.md": policies_page,
    "schedules.md": schedules_page,
    "presets.md": presets_page,
    "exit_codes.md": exit_codes_page,
}
"""Function that makes each page of the site that is not in git, by file name."""


def is_stale() -> bool:
    """Return whether the page of the run file differs from what the code would generate."""
    return not RUN_FILE.is_file() or RUN_FILE.read_text(encoding="utf-8") != _whole_run_file_page()


def _whole_run_file_page() -> str:
    return f"{_GENERATED}{run_file_page().rstrip()}\n"


def _page(*parts: str) -> str:
    """Return the text of a page, its parts separated by empty lines."""
    return "\n\n".join(part for part in parts if part)


def _flat(text: str) -> str:
    """Return text in one line for a table cell, with stars and bars escaped."""
    parts = _prose(text).replace("|", "\\|").split("`")
    return "`".join(p if i % 2 else p.replace("*", "\\*") for i, p in enumerate(parts))


def _prose(text: str) -> str:
    """Return the text of a docstring as one line of Markdown."""
    return re.sub(r"\s+", " ", _ROLE.sub(r"`\1`", text).replace("``", "`")).strip()


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(header)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    """Write the page of the run file, or check it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing, say if it is stale")
    if not parser.parse_args().check:
        write_text(RUN_FILE, _whole_run_file_page())
        return 0
    if is_stale():
        print("docs/reference/run_file.md is stale: python scripts/reference_pages.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
