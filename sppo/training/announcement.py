"""Lines printed before a run starts: model, data, cuts, parallelism and predicted memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sppo.parallel.mesh_shape import MeshShape

if TYPE_CHECKING:
    from rich.console import Console

    from sppo.config import RunConfig
    from sppo.training.checks.preflight import CheckedRun
    from sppo.training.job import Job

_TITLE_WIDTH = 10


def announce_ranks(run: RunConfig, console: Console) -> None:
    """Print the number of ranks to start, before the import of torch, which takes seconds.

    Args:
        run: Validated run configuration.
        console: Console to print to.
    """
    num_ranks = MeshShape.of(run.parallel).num_ranks
    _print_line(
        f"start     {num_ranks} ranks on this machine ({_parallelism(run)}): torch is loaded and "
        "the run is checked first",
        console,
    )


def announce_search(run: RunConfig, console: Console, *, num_devices: int) -> None:
    """Print that degrees are being chosen, if this may take minutes.

    Args:
        run: Run configuration that leaves out degrees.
        console: Console to print to.
        num_devices: Number of devices for which they are chosen.
    """
    if run.data.samples == "documents":
        _print_line(
            f"degrees   planning drawn steps for {num_devices} devices, as sppo solve does: this "
            "may take minutes",
            console,
        )


def announce_degrees(run: RunConfig, console: Console, *, num_devices: int) -> None:
    """Print the degrees of parallelism of a run whose file leaves some of them out.

    Args:
        run: Run configuration with the chosen degrees.
        console: Console to print to.
        num_devices: Number of devices for which they were chosen.
    """
    _print_line(
        f"degrees   {_parallelism(run) or 'all 1'}, chosen for {num_devices} devices; those you "
        "write are kept",
        console,
    )


def announce(job: Job, checked: CheckedRun) -> None:
    """Print the model, the data, the cuts, the parallelism and the predicted memory of a run.

    Args:
        job: Job that trains the run.
        checked: Results of the checks before training.
    """
    import torch

    from sppo.cost.parameters import num_parameters
    from sppo.kernels.native.extension import describe
    from sppo.units import counted, format_bytes, format_count

    run, memory = job.run, checked.plan.stages[0].memory.device
    parallelism = _parallelism(run)
    name = run.model.preset or run.model.from_hf or "model"
    data = checked.data
    of_longest = "of the longest samples alone " if run.data.samples == "documents" else ""
    lines = (
        f"model     {name}: {format_count(num_parameters(run.model))} parameters, "
        f"{run.train.dtype} on {job.device.describe()}, torch {torch.__version__}",
        f"data      {format_count(data.data.num_tokens)} tokens in "
        f"{counted(data.data.num_documents, 'document')}: {_epoch(checked)}"
        + _ids_made_elsewhere(run, checked),
        *_loss(run),
        *_cut(run, checked),
        *([f"parallel  {parallelism}; schedule {checked.plan.schedule}"] if parallelism else ()),
        f"policy    {checked.plan.policy}: predicted peak {of_longest}"
        f"{format_bytes(memory.total_bytes)} "
        f"({format_bytes(memory.activations_bytes)} activations, "
        f"{format_bytes(memory.kv_bytes + memory.kv_gradients_bytes)} K/V)",
        *_state(run, checked),
        *_offloads(run, checked),
        f"library   {describe()}",
        f"output    {run.train.output}",
        f"attention {checked.attention.text()}",
    )
    for line in lines:
        _print_line(line, job.console)


def _print_line(line: str, console: Console) -> None:
    from sppo.report.lines import print_line

    print_line(line, console, indent=_TITLE_WIDTH)


def _parallelism(run: RunConfig) -> str:
    """Return the degrees of parallelism above 1 as text, e.g. ``pipeline 2, sequence 4``."""
    parallel = run.parallel
    degrees = (
        ("data", parallel.data_parallel_degree),
        ("pipeline", parallel.pipeline_parallel_degree),
        ("sequence", parallel.sequence_parallel_degree),
    )
    return ", ".join(f"{name} {degree}" for name, degree in degrees if degree > 1)


def _epoch(checked: CheckedRun) -> str:
    """Return the number and lengths of the sequences or samples of an epoch as text."""
    import numpy as np

    from sppo.data.samples.document_samples import DocumentSamples
    from sppo.units import counted, format_count, format_tokens

    data = checked.data
    if not isinstance(data, DocumentSamples):
        return f"{counted(data.num_sequences, 'sequence')} of {format_tokens(data.length)} an epoch"
    lengths, left_out = data.table.lengths, data.table.num_left_out
    middle = np.percentile(lengths, (50, 90, 99), method="inverted_cdf").tolist()
    return (
        f"{format_count(data.num_samples)} samples of {int(lengths.min())} to "
        f"{int(lengths.max())} tokens an epoch, mean {round(float(lengths.mean()))}, "
        + ", ".join(f"p{share} {value}" for share, value in zip((50, 90, 99), middle, strict=True))
        + (f" ({counted(left_out, 'document')} left out)" if left_out else "")
    )


def _cut(run: RunConfig, checked: CheckedRun) -> tuple[str, ...]:
    """Return lines about the cuts of sequences, or the packing of samples."""
    from sppo.data.samples.document_samples import DocumentSamples
    from sppo.units import format_bytes, format_count, format_duration

    data, lengths = checked.data, checked.plan.lengths
    if isinstance(data, DocumentSamples):
        packed = (
            f"cut       samples into subsequences of at most about {max(lengths)} tokens, packed "
            "anew for every step"
        )
        if checked.next_step is None:  # all steps are done
            return (packed,)
        number, planned = checked.next_step.number, checked.next_step.planned
        step = planned.plan
        replicas = run.parallel.data_parallel_degree
        of_replica = f" on the first of {replicas} replicas" if replicas > 1 else ""
        return (
            packed,
            f"step      number {number}{of_replica}: {format_count(step.num_samples)} samples, "
            f"{format_count(step.tokens)} tokens in {step.num_split} split, "
            f"{step.num_batched} batched and {step.num_hybrid} hybrid subsequences; predicted "
            f"{format_duration(planned.prediction.step_s)}, {step.bubble_fraction:.1%} idle, peak "
            f"{format_bytes(step.device_peak_bytes)}",
        )
    if len(lengths) == 1:
        return (f"cut       nowhere: one subsequence of {lengths[0]} tokens",)
    longest, shortest = max(lengths), min(lengths)
    tokens = str(longest) if longest == shortest else f"{longest} to {shortest}"
    return (
        f"cut       {len(lengths)} subsequences of {tokens} tokens "
        f"(sequence.partition={_cut_by(run)})",
    )


def _state(run: RunConfig, checked: CheckedRun) -> tuple[str, ...]:
    """Return a line about the tiers of the training state, if a part of it is not on the device."""
    from sppo.units import format_bytes

    tiers = checked.plan.state_tiers
    if not tiers.leaves_device:
        return ()
    behind = max(rank.tier_state_bytes for rank in checked.plan.rank_memory)
    where = f" ({run.activations.disk})" if tiers.tier == "disk" else ""
    return (f"state     {tiers.text()}{where}: {format_bytes(behind)}",)


def _ids_made_elsewhere(run: RunConfig, checked: CheckedRun) -> str:
    """Return a note that ready-made ids cannot be checked against the vocabulary of the weights."""
    unknown = checked.data.data.meta.tokenizer.name == "ids" and run.model.from_hf is not None
    return f"; ready-made ids, taken for those of {run.model.from_hf}" if unknown else ""


def _loss(run: RunConfig) -> tuple[str, ...]:
    """Return a line about the terms of the loss, if it has other terms than the cross entropy."""
    terms = run.train.beside_cross_entropy
    return (
        (f"loss      cross entropy with {terms}; sppo eval reports the cross entropy alone",)
        if terms
        else ()
    )


def _offloads(run: RunConfig, checked: CheckedRun) -> tuple[str, ...]:
    """Return a line about offloaded activations, if there are any."""
    from sppo.units import format_bytes

    plan = checked.plan
    if not plan.offloads_anything:
        return ()
    ratios = plan.predicted.offload_ratios
    size = max(rank.tier_activations_bytes for rank in plan.rank_memory)
    where = "host memory" if plan.tier == "host" else run.activations.disk
    what = f"{min(ratios):.0%} to {max(ratios):.0%} of what a subsequence saves"
    if plan.kv == "offloaded":
        others = sum(stage.kv == "offloaded" for stage in plan.stages)
        what += f"; K and V of {others} of {len(plan.stages)} stages"
    return (f"offload   {format_bytes(size)} to {where} and back: {what}",)


def _cut_by(run: RunConfig) -> str:
    return "boundaries" if run.sequence.boundaries is not None else run.sequence.partition
