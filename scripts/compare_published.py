"""Compare published step times and memory on GPUs with the planner's predictions.

Each system is priced in its own layout (degrees, recomputation, attention back end, whole
sequences) with SPPO's formulas for kernels, links and memory. No figure is fitted to the result.
Features that a layout cannot express are listed below the table, with the seconds or bytes they may
cost.

    python scripts/compare_published.py [--output docs/results/compare_published.json]
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version

import numpy as np
from option_types import output_file
from published_configurations import Published, configurations
from rich import box
from rich.console import Console
from rich.table import Table

from sppo.activations.placement import ActivationPlacement
from sppo.activations.policy import saved_bytes_per_token
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_bytes_per_token
from sppo.cost.memory.stage_memory import state_memory
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.cost.pass_parts import PART_NAMES
from sppo.cost.stage_cost import stage_costs, stage_parts, stage_seconds
from sppo.cost.step_time import step_time
from sppo.output_file import write_text
from sppo.planning.baseline_cost import method_memory
from sppo.planning.baseline_methods import Method
from sppo.schedule.generate import generate
from sppo.schedule.program import lower
from sppo.schedule.simulation.simulate import simulate
from sppo.units import format_bytes

_WIDTH = 150
"""Columns of the output, also when written to a file."""


@dataclass(frozen=True)
class Comparison:
    """Predicted figures of a configuration beside the measured ones.

    Attributes:
        name: Name of the configuration.
        source: Publication of its figures.
        measured_s: Measured seconds of a step.
        predicted_s: Predicted seconds of a step.
        time_ratio: Predicted over measured seconds.
        measured_bytes: Measured peak memory of a device; None if it is not published.
        predicted_bytes: Predicted peak memory of a device.
        memory_ratio: Predicted over measured memory.
        parts_s: Predicted seconds of the first stage by part.
        memory_parts_bytes: Predicted bytes of a device of the first stage by bucket.
        reasons: Features of the system that SPPO's layout cannot express.
    """

    name: str
    source: str
    measured_s: float
    predicted_s: float
    time_ratio: float
    measured_bytes: float | None
    predicted_bytes: float
    memory_ratio: float | None
    parts_s: Mapping[str, float]
    memory_parts_bytes: Mapping[str, float]
    reasons: Sequence[str]


def main() -> None:
    """Price every configuration, and print the table and the reasons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=output_file, help="write the figures here as JSON")
    arguments = parser.parse_args()
    compared = [compare(published) for published in configurations()]
    print_comparisons(compared, console=Console(width=_WIDTH))
    if arguments.output:
        report = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "sppo": version("sppo"),
            "provenance": "analytic",
            "configurations": [asdict(comparison) for comparison in compared],
        }
        write_text(arguments.output, json.dumps(report, indent=2) + "\n")


def compare(published: Published) -> Comparison:
    """Return the comparison of one configuration."""
    parts, predicted_s = _time(published)
    memory = _memory(published)
    predicted_bytes = sum(memory.values())
    measured = published.measured_bytes
    return Comparison(
        published.name,
        published.source,
        published.measured_s,
        predicted_s,
        predicted_s / published.measured_s,
        measured,
        predicted_bytes,
        None if measured is None else predicted_bytes / measured,
        parts,
        memory,
        published.reasons,
    )


def _time(published: Published) -> tuple[dict[str, float], float]:
    """Return the seconds of the first stage by part, and of the step."""
    candidate = published.candidate
    seconds = stage_seconds(candidate)
    tokens = candidate.lengths[0]
    recomputed = np.array([[[round(share * tokens) for share in published.recomputed]]])
    recomputed = np.repeat(recomputed, len(candidate.stages), axis=0)
    placement = ActivationPlacement(tokens - recomputed, recomputed * 0, recomputed)
    costs = stage_costs(candidate, seconds=seconds, placement=placement)
    own = list(candidate.stages_of_rank(0))
    plain = [stage_parts(candidate)[stage] for stage in own]
    parts = {
        name: candidate.sequences
        * sum(float(getattr(passes, name).sum()) for stage in plain for passes in stage.values())
        for name in PART_NAMES
    }
    computed = float((costs.forward_s + costs.backward_s + costs.weight_s)[own].sum())
    units = seconds.units
    kept = float((units.forward + units.backward + units.weight)[own].sum())
    parts["gathers not hidden"] = kept - sum(parts.values())
    parts["recompute"] = computed - kept
    parts["reduce"] = float(seconds.reduce_s[own].sum())
    parts["update"] = float(seconds.update_s[own].sum())
    if candidate.virtual_stages > 1:
        schedule = generate(
            candidate.schedule,
            num_ranks=candidate.pipeline_parallel_degree,
            lengths=(candidate.lengths,) * candidate.sequences,
            num_virtual=candidate.virtual_stages,
        )
        step_s = simulate(lower(schedule, costs=costs), costs=costs).makespan_s
    else:
        step_s = step_time(costs, num_sequences=candidate.sequences).step_s
    parts["waits for other stages"] = step_s - sum(parts.values())
    return parts, step_s


def _memory(published: Published) -> dict[str, float]:
    """Return the bytes of a device of the first stage by bucket.

    Sequences are whole, and K/V of one layer at a time. State is counted as SPPO's; activations are
    those of the layers held, or Megatron's own count.
    """
    candidate = published.candidate
    workload, model = candidate.workload, candidate.workload.model
    if published.method is not None:
        return _method_memory(candidate, published.method)
    own = state_memory(candidate, units=UnitsInFlight(candidate))[0].device
    layers = published.layers_held or len(candidate.stages[0])
    tokens = published.micro_batch * candidate.lengths[0]
    here = tokens / workload.sequence_parallel_degree
    if published.tensor_parallel:
        share = 10 + 24 / published.tensor_parallel
        activations = layers * tokens * model.hidden_size * share
    else:
        saved = {
            policy: saved_bytes_per_token(policy, model, element_bytes=workload.element_bytes)
            for policy in ("retain", "keep_attention", "recompute")
        }
        _, attention, linear = published.recomputed
        bytes_per_token = (
            saved["recompute"]
            + (1 - attention) * (saved["keep_attention"] - saved["recompute"])
            + (1 - linear) * (saved["retain"] - saved["keep_attention"])
        )
        activations = layers * here * bytes_per_token
        if published.recomputed[0] == 0 and attention == linear == 0:
            activations += layers * tokens * kv_bytes_per_token(workload)[0]
    if published.inputs_offloaded:
        activations = 0.0
    on_device = not candidate.state.offloads_optimizer
    return {
        "weights": own.weights_bytes,
        "gradients": on_device * own.gradients_bytes,
        "optimizer": on_device * own.optimizer_bytes,
        "activations": activations,
        "working set": published.micro_batch * own.working_bytes,
        "exchanges": own.communication_bytes,
    }


def _method_memory(candidate: Candidate, method: Method) -> dict[str, float]:
    """Return the bytes of the fullest device by bucket, of a method of `sppo estimate`."""
    device = max(
        (stage.device for stage in method_memory(candidate, method)),
        key=lambda buckets: buckets.total_bytes,
    )
    kv = device.kv_bytes + device.kv_gradients_bytes
    return {
        "weights": device.weights_bytes,
        "gradients": device.gradients_bytes,
        "optimizer": device.optimizer_bytes,
        "activations": kv + device.activations_bytes + device.loss_gradient_bytes,
        "working set": device.working_bytes,
        "exchanges": device.communication_bytes,
    }


def print_comparisons(compared: Sequence[Comparison], *, console: Console) -> None:
    """Print one row per configuration, then its parts and what its layout cannot express."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("step", "predicted", "ratio", "memory", "predicted", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in compared:
        memory = ("", format_bytes(row.predicted_bytes), "")
        if row.measured_bytes is not None and row.memory_ratio is not None:
            memory = (
                format_bytes(row.measured_bytes),
                format_bytes(row.predicted_bytes),
                f"{row.memory_ratio:.2f}",
            )
        times = (f"{row.measured_s:.4g} s", f"{row.predicted_s:.4g} s", f"{row.time_ratio:.2f}")
        table.add_row(row.name, *times, *memory)
    console.print(table)
    for row in compared:
        if not row.reasons:
            continue
        console.print(row.name, highlight=False)
        seconds = ", ".join(f"{name} {s:.3g} s" for name, s in row.parts_s.items() if s > 0.001)
        held = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in row.memory_parts_bytes.items() if size
        )
        console.print(f"  predicted: {seconds}", highlight=False)
        console.print(f"  predicted: {held}", highlight=False)
        for reason in row.reasons:
            console.print(f"  - {reason}", highlight=False)


if __name__ == "__main__":
    main()
