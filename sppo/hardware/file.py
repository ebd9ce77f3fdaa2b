"""Hardware descriptions as files, and the one that a run file asks for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from sppo.config.json_file import JsonError, read_json
from sppo.config.problems import nearest
from sppo.config.run import HardwareConfig
from sppo.hardware.description import HardwareSpec
from sppo.hardware.presets import PRESETS
from sppo.quoting import one_line, quoted

_ADAPTER = TypeAdapter(HardwareSpec)
_FIX = "sppo bench all -o FILE writes a good one"
_SHOWN_PROBLEMS = 5


def hardware_for(
    config: Literal["auto"] | HardwareConfig, *, this_machine: HardwareSpec | None = None
) -> HardwareSpec:
    """The machine a run file names.

    Args:
        config: the run file's ``hardware``.
        this_machine: what "auto" means; a laptop without a GPU if nothing is known.

    Raises:
        ValueError: an unknown preset, or a file that is no hardware description.
        OSError: the file cannot be read.
    """
    if config == "auto":
        return this_machine or PRESETS["laptop-cpu"]
    if config.file is not None:
        spec = read_hardware(Path(config.file))
    elif config.preset is None:
        spec = this_machine or PRESETS["laptop-cpu"]
    elif config.preset in PRESETS:
        spec = PRESETS[config.preset]
    else:
        raise ValueError(
            f"hardware.preset {quoted(config.preset)} is not one of {', '.join(PRESETS)}."
            f"{nearest(config.preset, tuple(PRESETS))}"
        )
    given = config.model_fields_set
    if "nodes" in given:
        spec = replace(spec, num_nodes=config.nodes)
    if "devices_per_node" in given:
        spec = replace(spec, node=replace(spec.node, num_devices=config.devices_per_node))
    return spec


def read_hardware(path: Path) -> HardwareSpec:
    """A hardware description from a JSON file, as ``sppo bench -o`` writes it.

    Raises:
        ValueError: not JSON, or fields missing, unknown or out of range; names them all.
        OSError: the file cannot be read.
    """
    try:
        return _ADAPTER.validate_python(read_json(path))
    except ValidationError as error:
        raise ValueError(f"hardware file {path}: {_problems(error)}; {_FIX}") from None
    except JsonError as error:
        raise ValueError(f"hardware file {error}; {_FIX}") from None


def hardware_json(spec: HardwareSpec) -> dict[str, Any]:
    """`spec` as plain values, the content of its file."""
    return asdict(spec)


def hardware_digest(spec: HardwareSpec) -> str:
    """SHA-256 of the canonical JSON form."""
    return hashlib.sha256(json.dumps(hardware_json(spec), sort_keys=True).encode()).hexdigest()


def _problems(error: ValidationError) -> str:
    """Return the first problems, each with the path of its value."""
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    shown = [
        f"{one_line('.'.join(map(str, problem['loc']))) or 'file'}: {one_line(problem['msg'])}"
        for problem in problems[:_SHOWN_PROBLEMS]
    ]
    more = len(problems) - len(shown)
    return "; ".join([*shown, *([f"and {more} more"] if more else [])])
