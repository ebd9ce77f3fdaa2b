"""``sppo estimate``: predicted memory of a run as it stands, by memory bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from sppo.api import estimate as estimate_run
from sppo.cli.arguments import Json, Overrides, RunFile, load_planned_run
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import Screen, emit, table
from sppo.cli.solution.candidate import (
    choices_json,
    hardware_json,
    host_memory_text,
    memory_screen,
    policy_text,
    shortfall_json,
    stages_json,
    states_line,
    validation_json,
    validation_line,
)
from sppo.hardware.run_hardware import hardware_line
from sppo.planning.estimate import Estimate
from sppo.planning.why_nothing_fits import run_line
from sppo.units import GIB, format_bytes


def estimate(run_file: RunFile, overrides: Overrides = None, json_output: Json = False) -> None:
    """Predict memory by bucket, as sppo train would plan the run; nothing is run.

    Degrees that the run file leaves out are those that sppo solve chooses for the machine in the
    section hardware, by default this machine; policy auto is a policy that fits. Needs neither the
    data, nor the weights, nor the machine that is planned for.

        sppo estimate configs/run/gpt_7b_512k_32gpu.yaml sequence.length=4Mi
    """
    with exit_codes():
        found = estimate_run(load_planned_run(run_file, overrides or ()))
    emit(partial(_values, found), partial(_screen, found), as_json=json_output)


def _values(found: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON values."""
    evaluated = found.evaluated
    return {
        "fits": evaluated.shortfall is None,
        "shortfall": shortfall_json(evaluated.shortfall),
        **evaluated.degrees.by_name,
        **choices_json(evaluated),
        "virtual_stages": evaluated.candidate.virtual_stages,
        "chosen_by_solve": list(found.chosen),
        "device_peak_bytes": evaluated.device_peak_bytes,
        "host_peak_bytes": evaluated.host_peak_bytes,
        "node_host_peak_bytes": evaluated.node_host_bytes,
        "model": {**asdict(found.counts), "state_bytes": found.counts.state_bytes},
        "stages": stages_json(evaluated),
        **validation_json(found.validation),
        "hardware": hardware_json(found.hardware),
    }


def _screen(found: Estimate) -> Screen:
    """Yield the model, the bytes of one sequence, and the memory of every stage of the run."""
    evaluated = found.evaluated
    yield run_line(found.run)
    yield f"on {hardware_line(found.hardware)}"
    headings = ["one sequence, all devices", "", "a token and layer"]
    yield table(headings, _count_rows(found))
    yield from _plan_lines(found)
    if evaluated.node_host_bytes:
        yield host_memory_text(evaluated.host_peak_bytes, node_bytes=evaluated.node_host_bytes)
    yield ""
    yield from memory_screen(evaluated)


def _plan_lines(found: Estimate) -> Iterator[str]:
    """Yield lines about the plan of the run, and whether it fits."""
    evaluated, candidate = found.evaluated, found.evaluated.candidate
    schedule = candidate.schedule
    if candidate.virtual_stages > 1:
        schedule += f" with {candidate.virtual_stages} stages on a rank"
    yield (
        f"{'as solve chooses' if found.chosen else 'as it stands'}: {evaluated.degrees.text()}, "
        f"N={len(candidate.lengths)}, schedule {schedule}, policy {evaluated.effective_policy}: "
        f"{policy_text(evaluated)}"
    )
    yield from states_line(candidate)
    if found.chosen:
        yield f"chosen by solve: {', '.join(found.chosen)}"
    if evaluated.shortfall is None:
        yield "fits"
        yield from validation_line(found.validation)
    else:
        yield f"does not fit: {evaluated.shortfall.reason}"
        yield "sppo solve says what would"


def _count_rows(found: Estimate) -> Iterator[Sequence[str] | None]:
    """Yield rows of model states, and of one sequence's activations by several counts."""
    counts, model = found.counts, found.run.model
    per_layer_token = found.run.sequence.length * model.num_layers
    states = f"{counts.state_bytes_per_parameter} B a parameter"
    if counts.trained_parameters < counts.parameters:
        states += f", {counts.frozen_bytes_per_parameter} B a frozen one"
    yield ["model states", _gib(counts.state_bytes), states]
    yield None
    kv = "K and V"
    if model.group_size > 1:  # grouped queries leave a share of them
        kv = f"K and V, {model.kv_heads} heads for {model.num_heads} (1/{model.group_size})"
    if model.linear_attention is not None:
        kv += f", in {model.num_attention_layers} of {model.num_layers} layers"
    activations = {
        **{f"activations, {policy}": held for policy, held in counts.saved_bytes.items()},
        kv: counts.kv_bytes,
        "dK and dV in fp32": counts.kv_gradients_bytes,
    }
    for name, held in activations.items():
        yield [name, _gib(held), f"{held / per_layer_token:,.0f} B"]
    if counts.linear_state_bytes:
        yield ["states of linear attention", _gib(counts.linear_state_bytes), "a subsequence"]


def _gib(amount: int) -> str:
    """Format bytes in GiB, however many, so that rows compare."""
    return f"{amount / GIB:,.1f} GiB" if amount >= GIB else format_bytes(amount)
