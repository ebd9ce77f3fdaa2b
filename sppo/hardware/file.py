"""Hardware descriptions as JSON files, and the hardware description that a run file names."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from sppo.config.json_file import JsonError, read_json
from sppo.config.problems import RULE_CHARACTERS, nearest
from sppo.config.run import DEFAULT_MARGIN, HardwareConfig
from sppo.hardware.description import HOST_FRACTION, HardwareSpec
from sppo.hardware.presets import PRESETS
from sppo.quoting import one_line, quoted
from sppo.units import format_bytes

_ADAPTER = TypeAdapter(HardwareSpec)
_FIX = "sppo bench all -o FILE writes a good one"
_SHOWN_PROBLEMS = 5


def hardware_for(
    config: Literal["auto"] | HardwareConfig, *, this_machine: HardwareSpec | None = None
) -> HardwareSpec:
    """Return the hardware description that a run file names, with the memory that plans may fill.

    Args:
        config: Value of the run file's ``hardware``.
        this_machine: Machine that "auto" refers to; if None, the preset "laptop-cpu".

    Raises:
        ValueError: An unknown preset, a file that is no hardware description, or a key that the
            machine does not support.
        OSError: The file cannot be read.
    """
    if config == "auto":
        return _plannable(this_machine or PRESETS["laptop-cpu"], DEFAULT_MARGIN)
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
    node, given = spec.node, config.model_fields_set
    if "devices_per_node" in given:
        node = replace(node, num_devices=config.devices_per_node)
    if config.host_memory is not None:
        if spec.device.kind == "cpu":
            raise ValueError(
                f"hardware.host_memory {format_bytes(config.host_memory)}: the memory of "
                f"{spec.name} is its device's, there is none behind it: leave the key out"
            )
        node = replace(node, host_memory_bytes=config.host_memory)
    if config.attention != "auto":
        spec = _with_attention(spec, config.attention)
    num_nodes = config.nodes if "nodes" in given else spec.num_nodes
    return _plannable(replace(spec, node=node, num_nodes=num_nodes), config.margin)


def _with_attention(spec: HardwareSpec, backend: str) -> HardwareSpec:
    """Return `spec` with attention predicted from the published rates of `backend`.

    Raises:
        ValueError: `spec` has measured attention, or no published rates of `backend`.
    """
    device = spec.device
    if device.attention_points or backend not in device.published_backends:
        known = "" if device.attention_points else ", ".join(device.published_backends)
        reason = "was measured there" if device.attention_points else "is not known there"
        raise ValueError(
            f"hardware.attention {backend} on {spec.name}: its rate {reason}; leave the key out"
            + (f", or write one of {known}" if known else "")
        )
    return replace(spec, device=replace(device, attention_backend=backend))


def _plannable(spec: HardwareSpec, margin: float) -> HardwareSpec:
    """Return `spec` with the memory that plans may fill.

    The fraction `margin` of each device's memory is added to its reserve, and of host memory
    `HOST_FRACTION` is left.
    """
    device, node = spec.device, spec.node
    reserved = device.reserved_bytes + round(margin * device.memory_bytes)
    reserved = min(reserved, device.memory_bytes)
    return replace(
        spec,
        device=replace(device, reserved_bytes=reserved),
        node=replace(node, host_memory_bytes=int(node.host_memory_bytes * HOST_FRACTION)),
    )


def read_hardware(path: Path) -> HardwareSpec:
    """Read a hardware description from a JSON file, as ``sppo bench -o`` writes it.

    Raises:
        ValueError: The file is not JSON, or fields are missing, unknown or out of range; the
            message names the first five.
        OSError: The file cannot be read.
    """
    try:
        # JSON is parsed strictly, so that neither true nor "1" counts as 1.
        return _ADAPTER.validate_json(json.dumps(read_json(path)), strict=True)
    except ValidationError as error:
        raise ValueError(f"hardware file {path}: {_problems(error)}; {_FIX}") from None
    except JsonError as error:
        raise ValueError(f"hardware file {error}; {_FIX}") from None


def hardware_json(spec: HardwareSpec) -> dict[str, Any]:
    """Return `spec` as the plain values that its JSON file contains."""
    return asdict(spec)


def _problems(error: ValidationError) -> str:
    """Return a message with the first problems of `error`, each with the path of its value."""
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    shown = [
        f"{one_line('.'.join(map(str, problem['loc']))) or 'file'}: "
        + one_line(problem["msg"].removeprefix("Value error, "), most=RULE_CHARACTERS)
        for problem in problems[:_SHOWN_PROBLEMS]
    ]
    more = len(problems) - len(shown)
    return "; ".join([*shown, *([f"and {more} more"] if more else [])])
