"""Lines printed before the first step: model, data, cuts, parallelism and predicted memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from sppo.config import RunConfig
from sppo.cost.parameters import num_parameters
from sppo.data.sample_rows import TrainingData
from sppo.parallel.mesh_shape import MeshShape
from sppo.planning.plan import ExecutionPlan
from sppo.report.lines import print_titled
from sppo.training.attention_in_use import attention_text
from sppo.training.preflight import CheckedRun, NextStep
from sppo.units import counted, format_bytes, format_count, format_duration, format_tokens


def announce(checked: CheckedRun) -> None:
    """Print the model, the data, the cuts, the parallelism and the predicted memory of a run."""
    for title, text in _lines(checked):
        print_titled(title, text, checked.job.console)


def _lines(checked: CheckedRun) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each line."""
    run, plan, data = checked.job.run, checked.plan, checked.data
    name = run.model.preset or run.model.from_hf or "model"
    yield (
        "model",
        f"{name}: {format_count(num_parameters(run.model))} parameters, {run.train.dtype} on "
        f"{checked.job.device.describe()}, torch {torch.__version__}",
    )
    made_elsewhere = data.data.meta.tokenizer.name == "ids" and run.model.from_hf is not None
    yield (
        "data",
        f"{format_count(data.data.num_tokens)} tokens in "
        f"{counted(data.data.num_documents, 'document')}: {_epoch(run, data)}"
        + (f"; ready-made ids, taken for those of {run.model.from_hf}" if made_elsewhere else ""),
    )
    if terms := run.train.beside_cross_entropy:
        yield "loss", f"cross entropy with {terms}; sppo eval reports the cross entropy alone"
    if run.data.samples == "documents":
        yield from _packing(run, plan, checked.next_step)
    else:
        yield "cut", _cut(run, plan.lengths)
    if parallelism := str(MeshShape.of(run.parallel)):
        yield "parallel", f"{parallelism}; schedule {plan.schedule}"
    of_longest = "of the longest samples alone " if run.data.samples == "documents" else ""
    memory = plan.stages[0].memory.device
    yield (
        "policy",
        f"{plan.policy}: predicted peak {of_longest}{format_bytes(memory.total_bytes)} "
        f"({format_bytes(memory.activations_bytes)} activations, "
        f"{format_bytes(memory.kv_bytes + memory.kv_gradients_bytes)} K/V)",
    )
    tiers = plan.state
    if tiers.leaves_device:
        behind = max(rank.tier_state_bytes for rank in plan.rank_memory)
        where = f" ({run.activations.disk})" if tiers.tier == "disk" else ""
        yield "state", f"{tiers.text()}{where}: {format_bytes(behind)}"
    if plan.offloads_anything:
        yield "offload", _offloads(run, plan)
    yield "output", run.train.output
    yield "attention", attention_text(checked.attention)


def _epoch(run: RunConfig, data: TrainingData) -> str:
    """Return the number and lengths of the sequences or samples of an epoch as text."""
    if run.data.samples == "stream":
        length = format_tokens(run.sequence.length)
        return f"{counted(data.num_samples, 'sequence')} of {length} an epoch"
    lengths, left_out = data.table.lengths, data.table.num_left_out
    middle = np.percentile(lengths, (50, 90, 99), method="inverted_cdf").tolist()
    return (
        f"{format_count(data.num_samples)} samples of {int(lengths.min())} to "
        f"{int(lengths.max())} tokens an epoch, mean {round(float(lengths.mean()))}, "
        + ", ".join(f"p{share} {value}" for share, value in zip((50, 90, 99), middle, strict=True))
        + (f" ({counted(left_out, 'document')} left out)" if left_out else "")
    )


def _cut(run: RunConfig, lengths: tuple[int, ...]) -> str:
    """Return the cuts of the sequences as text."""
    longest, shortest = max(lengths), min(lengths)
    if len(lengths) == 1:
        return f"nowhere: one subsequence of {longest} tokens"
    tokens = str(longest) if longest == shortest else f"{longest} to {shortest}"
    by = "boundaries" if run.sequence.boundaries is not None else run.sequence.partition
    return f"{len(lengths)} subsequences of {tokens} tokens (sequence.partition={by})"


def _packing(
    run: RunConfig, plan: ExecutionPlan, next_step: NextStep | None
) -> Iterator[tuple[str, str]]:
    """Yield the lines about the packing of samples, and the next step if any is left."""
    yield (
        "cut",
        f"samples into subsequences of at most about {max(plan.lengths)} tokens, packed anew for "
        "every step",
    )
    if next_step is None:
        return
    planned, step = next_step.planned, next_step.planned.plan
    replicas = run.parallel.data_parallel_degree
    of_replica = f" on the first of {replicas} replicas" if replicas > 1 else ""
    yield (
        "step",
        f"number {next_step.number}{of_replica}: {format_count(step.num_samples)} samples, "
        f"{format_count(step.tokens)} tokens in {step.num_split} split, {step.num_batched} batched "
        f"and {step.num_hybrid} hybrid subsequences; predicted "
        f"{format_duration(planned.prediction.step_s)}, {step.bubble_fraction:.1%} idle, peak "
        f"{format_bytes(step.device_peak_bytes)}",
    )


def _offloads(run: RunConfig, plan: ExecutionPlan) -> str:
    """Return what is offloaded, and where to, as text."""
    ratios = plan.predicted.offload_ratios
    size = max(rank.tier_activations_bytes for rank in plan.rank_memory)
    where = "host memory" if plan.activation_tier == "host" else run.activations.disk
    what = f"{min(ratios):.0%} to {max(ratios):.0%} of what a subsequence saves"
    if plan.kv == "offloaded":
        others = plan.kv_of_stages.count("offloaded")
        what += f"; K and V of {others} of {len(plan.stages)} stages"
    return f"{format_bytes(size)} to {where} and back: {what}"
