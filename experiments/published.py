"""Compare published step times and memory on GPUs with the planner's predictions.

Each system of ``published.json`` is priced in its own layout (degrees, recomputation, attention
back end, whole sequences) with SPPO's formulas for kernels, links and memory. No figure is fitted
to the result. Features that a layout cannot express are listed below the table, with the seconds or
bytes they may cost. The H100 of torchtitan have 96 GB of HBM2e at 2.4 TB/s, four fifths of which
count.

    python -m experiments.published --output docs/results/compare_published.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import harness
from experiments.baseline_methods import METHODS, Method
from sppo.activations.placement import ActivationPlacement
from sppo.activations.policy import saved_bytes_per_token
from sppo.config.model import ModelConfig
from sppo.config.model.presets import PRESETS as MODELS
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_bytes_per_token
from sppo.cost.layer import PART_NAMES, Workload
from sppo.cost.memory.state_memory import state_memory
from sppo.cost.memory.unit_working_sets import computing_bytes
from sppo.cost.stages.seconds import stage_parts, stage_seconds
from sppo.cost.stages.stage_cost import stage_costs
from sppo.cost.state_tiers import StateTiers
from sppo.cost.step_time import step_time
from sppo.hardware.description import HardwareSpec
from sppo.hardware.presets import PRESETS
from sppo.schedule.program import generate, lower
from sppo.schedule.simulation.simulate import simulate
from sppo.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Published:
    """Configuration that others measured, as it stands in ``published.json``.

    Attributes:
        name: System, model and machine.
        source: Publication of the figures.
        model: Preset of the model, and keys that replace its own.
        machine: Preset of the machine, its attention back end, and other figures of its own.
        length: Tokens of a sequence, which is one unit.
        layout: Degrees and schedule of the candidate.
        workload: Sequence parallelism of the candidate.
        optimizer: Tier of the optimizer states.
        recomputed: Shares of (x_in, attention, linear) that backward recomputes.
        measured_s: Measured seconds of a step.
        measured_bytes: Measured peak memory of a device; None if it is not published.
        reasons: Features of the system that the candidate cannot express.
        micro_batch: Number of sequences that a device runs at once.
        layers_held: Number of layers whose activations a device of the first stage holds at once;
            None for all layers of a stage.
        inputs_offloaded: Whether layer inputs are offloaded to host memory.
        method: Baseline method by which memory is counted, and whether it uses host memory; None
            counts the activations of `layers_held`.
        tensor_parallel: Tensor parallel degree t of Megatron without sequence parallelism, which
            saves 10 + 24 / t bytes of activations per token and hidden unit; 0 if the system saves
            the same tensors as SPPO.
    """

    name: str
    source: str
    model: Mapping[str, Any]
    machine: Mapping[str, Any]
    length: int
    layout: Mapping[str, Any]
    workload: Mapping[str, Any]
    optimizer: str = "device"
    recomputed: tuple[float, float, float]
    measured_s: float
    measured_bytes: float | None = None
    reasons: tuple[str, ...]
    micro_batch: int = 1
    layers_held: int | None = None
    inputs_offloaded: bool = False
    method: Mapping[str, Any] | None = None
    tensor_parallel: int = 0

    @property
    def candidate(self) -> Candidate:
        """Layout of the step as a candidate."""
        preset = MODELS[self.model["preset"]]
        model = ModelConfig.model_validate({**preset, **self.model})
        return Candidate(
            Workload(model, self._hardware(), **self.workload),
            (self.length,),
            state=StateTiers(optimizer=self.optimizer),  # type: ignore[arg-type]
            **self.layout,
        )

    def _hardware(self) -> HardwareSpec:
        spec = PRESETS[self.machine["preset"]]
        rate = self.machine.get("memory_bytes_per_s", spec.device.memory_bytes_per_s)
        device = replace(
            spec.device, attention_backend=self.machine["attention"], memory_bytes_per_s=rate
        )
        node = replace(spec.node, num_devices=self.machine.get("devices", spec.node.num_devices))
        return replace(spec, device=device, node=node, num_nodes=self.machine.get("nodes", 1))


def configurations() -> list[Published]:
    """Return all published configurations."""
    read = json.loads(Path(__file__).with_name("published.json").read_text())
    reasons = read["reasons"]
    return [
        Published(**{"workload": {}, **row, "reasons": tuple(map(reasons.get, row["reasons"]))})
        for row in read["configurations"]
    ]


def main() -> None:
    """Price every configuration, and print the table and the reasons."""
    options = harness.parser(__doc__).parse_args()
    rows = [compare(published) for published in configurations()]
    harness.print_table(
        ("", "step", "predicted", "ratio", "memory", "predicted", "ratio"),
        [
            (
                row["name"],
                f"{row['measured_s']:.4g} s",
                f"{row['predicted_s']:.4g} s",
                f"{row['time_ratio']:.2f}",
                "" if row["measured_bytes"] is None else format_bytes(row["measured_bytes"]),
                format_bytes(row["predicted_bytes"]),
                "" if row["memory_ratio"] is None else f"{row['memory_ratio']:.2f}",
            )
            for row in rows
        ],
    )
    for row in rows:
        seconds = ", ".join(f"{name} {s:.3g} s" for name, s in row["parts_s"].items() if s > 0.001)
        held = ", ".join(
            f"{name} {format_bytes(size)}"
            for name, size in row["memory_parts_bytes"].items()
            if size
        )
        lines = [row["name"], f"  predicted: {seconds}", f"  predicted: {held}"]
        print("\n".join([*lines, *(f"  - {reason}" for reason in row["reasons"])]))
    report = {**harness.header("analytic"), "configurations": rows}
    harness.write_report(options.output, report)


def compare(published: Published) -> dict[str, Any]:
    """Return the predicted figures of a configuration beside the measured ones."""
    parts, predicted_s = _time(published)
    memory = _memory(published)
    predicted_bytes = sum(memory.values())
    measured = published.measured_bytes
    return {
        "name": published.name,
        "source": published.source,
        "measured_s": published.measured_s,
        "predicted_s": predicted_s,
        "time_ratio": predicted_s / published.measured_s,
        "measured_bytes": measured,
        "predicted_bytes": predicted_bytes,
        "memory_ratio": None if measured is None else predicted_bytes / measured,
        "parts_s": parts,
        "memory_parts_bytes": memory,
        "reasons": published.reasons,
    }


def _time(published: Published) -> tuple[dict[str, float], float]:
    """Return the seconds of the first stage by part, and of the step."""
    candidate = published.candidate
    seconds = stage_seconds(candidate)
    costs = stage_costs(candidate, _placement(published))
    own = list(candidate.stages_of_rank(0))
    plain = [stage_parts(candidate)[stage] for stage in own]
    parts = {name: candidate.sequences * sum(stage[name] for stage in plain) for name in PART_NAMES}
    computed = float((costs.forward_s + costs.backward_s + costs.weight_s)[own].sum())
    kept = float((seconds.forward + seconds.backward + seconds.weight)[own].sum())
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


def _placement(published: Published) -> ActivationPlacement:
    """Return the placement that recomputes the published shares of each class."""
    candidate = published.candidate
    tokens = candidate.lengths[0]
    recomputed = np.array([[[round(share * tokens) for share in published.recomputed]]])
    recomputed = np.repeat(recomputed, len(candidate.stages), axis=0)
    return ActivationPlacement(tokens - recomputed, recomputed * 0, recomputed)


def _memory(published: Published) -> dict[str, float]:
    """Return the bytes of a device of the first stage by bucket.

    Sequences are whole, and K/V of one layer at a time. State is counted as SPPO's; activations are
    those of the layers held, or Megatron's own count.
    """
    candidate = published.candidate
    workload, model = candidate.workload, candidate.workload.model
    if published.method is not None:
        method = next(one for one in METHODS if one.name == published.method["name"])
        return _method_memory(candidate, replace(method, uses_host=published.method["uses_host"]))
    own = state_memory(candidate)[0].device
    layers = published.layers_held or len(candidate.stages[0])
    tokens = published.micro_batch * candidate.lengths[0]
    here = tokens / workload.sequence_parallel_degree
    if published.tensor_parallel:
        share = 10 + 24 / published.tensor_parallel
        activations = layers * tokens * model.hidden_size * share
    else:
        saved = {
            policy: saved_bytes_per_token(
                policy, model, layers=range(layers), element_bytes=workload.element_bytes
            )
            for policy in ("retain", "keep_attention", "recompute")
        }
        _, attention, linear = published.recomputed
        activations = here * (
            saved["recompute"]
            + (1 - attention) * (saved["keep_attention"] - saved["recompute"])
            + (1 - linear) * (saved["retain"] - saved["keep_attention"])
        )
        if published.recomputed[0] == 0 and attention == linear == 0:
            activations += layers * tokens * kv_bytes_per_token(workload)[0]
    if published.inputs_offloaded:
        activations = 0.0
    working_bytes = float(computing_bytes(candidate, _placement(published)).max())
    on_device = not candidate.state.offloads_optimizer
    return {
        "weights": own.weights_bytes,
        "gradients": on_device * own.gradients_bytes,
        "optimizer": on_device * own.optimizer_bytes,
        "activations": activations,
        "working set": published.micro_batch * working_bytes,
        "exchanges": own.communication_bytes,
    }


def _method_memory(candidate: Candidate, method: Method) -> dict[str, float]:
    """Return the bytes of the fullest device by bucket, of a baseline method."""
    device = max(
        (stage.device for stage in method.memory(candidate)),
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


if __name__ == "__main__":
    main()
