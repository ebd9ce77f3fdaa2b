"""Report of a run: its setup before the first step; files, plots and figures at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY
from sppo.config import RunConfig
from sppo.cost.memory.stage_memory import SAVED_IN_BACKGROUND
from sppo.cost.stages.links import copy_bytes_per_s
from sppo.cost.trainable import counts_text
from sppo.data.mixture import Mixture, mixture_of
from sppo.data.sample_rows import TrainingData
from sppo.offload.copy_report import CopyReport
from sppo.parallel.mesh_shape import MeshShape
from sppo.planning.plan import ExecutionPlan, read_plan
from sppo.plots.chrome_trace import write_trace
from sppo.plots.experts import experts_plot
from sppo.plots.loss import loss_plot
from sppo.plots.positions import validations_plot
from sppo.plots.timeline import write_png
from sppo.report.lines import print_line, print_titled
from sppo.report.metrics import METRICS_FILE, StepMetrics, read_metrics
from sppo.report.run_summary import (
    CopiesSummary,
    Pair,
    RunSummary,
    ValidationSummary,
    print_summary,
    read_summary,
    run_summary,
    write_summary,
)
from sppo.report.validation import VALIDATION_FILE
from sppo.training.attention_in_use import attention_text
from sppo.training.preflight import CheckedRun
from sppo.training.records.executed_step import StepTimelines
from sppo.training.records.outcome import TrainingOutcome, predicted_and_measured
from sppo.training.run_directory import (
    EXPERTS_PLOT,
    LOSS_PLOT,
    PLAN_FILE,
    POSITIONS_PLOT,
    RESULT_FILES,
    SUMMARY_FILE,
    TIMELINE_PLOT,
    TIMELINE_TRACE,
)
from sppo.units import counted, format_bytes, format_count, format_duration, format_tokens

Writer = Callable[[Path], None]
"""Function that writes a file."""

_PHASES = ("forward", "backward", "data and update")
_MOST_DRAWN = 4000
"""Largest number of actions for which a PNG plot is drawn; the Chrome trace can be zoomed."""
_WRITTEN = (*RESULT_FILES, CHECKPOINTS_DIRECTORY)
"""Names of entries of the output directory, in the order in which the report lists them."""


def announce(checked: CheckedRun) -> None:
    """Print the model, the data, the cuts, the parallelism and the predicted memory of a run."""
    run, plan, data = checked.job.run, checked.plan, checked.data
    say = partial(print_titled, console=checked.job.console)
    name = run.model.from_hf or run.model.preset or "model"
    say(
        "model",
        f"{name}: {counts_text(run)}, {run.train.dtype} on "
        f"{checked.job.device.describe()}, torch {torch.__version__}",
    )
    with_ids = any(source.meta.tokenizer.name == "ids" for source in data.sources)
    made_elsewhere = with_ids and run.model.from_hf is not None
    documents = counted(sum(source.num_documents for source in data.sources), "document")
    say(
        "data",
        f"{format_count(sum(source.num_tokens for source in data.sources))} tokens in "
        f"{documents}: {_epoch(run, data)}"
        + (f"; ready-made ids, taken for those of {run.model.from_hf}" if made_elsewhere else ""),
    )
    if run.data.sources is not None:
        say("mixture", _mixture(mixture_of(run, data.sources)))
    if terms := run.train.beside_cross_entropy:
        say("loss", f"cross entropy with {terms}; sppo eval reports the cross entropy alone")
    if run.data.samples == "documents":
        most = f"samples into subsequences of at most about {max(plan.lengths)} tokens"
        say("cut", f"{most}, packed anew for every step")
    else:
        say("cut", _cut(run, plan.lengths))
    if parallelism := str(MeshShape.of(run.parallel)):
        say("parallel", f"{parallelism}; schedule {plan.schedule}")
    if changed := _other_ranks(Path(run.train.output) / PLAN_FILE, plan):
        say("ranks", changed)
    of_longest = "of the longest samples alone " if run.data.samples == "documents" else ""
    memory = plan.stages[0].memory.device
    say(
        "policy",
        f"{plan.policy}: predicted peak {of_longest}{format_bytes(memory.total_bytes)} "
        f"({format_bytes(memory.activations_bytes)} activations, "
        f"{format_bytes(memory.kv_bytes + memory.kv_gradients_bytes)} K/V)",
    )
    tiers = plan.state
    if tiers.leaves_device:
        behind = max(rank.tier_state_bytes for rank in plan.rank_memory)
        where = f" ({run.activations.disk})" if tiers.tier == "disk" else ""
        say("state", f"{tiers.text()}{where}: {format_bytes(behind)}")
    if plan.offloads_anything:
        say("offload", _offloads(run, plan))
    if checked.validation is not None:
        say("validate", checked.validation.plan.text())
    say("output", run.train.output)
    say("attention", attention_text(checked.attention))


def _other_ranks(file: Path, plan: ExecutionPlan) -> str | None:
    """Return the predicted step time beside that of the plan in a file, if that has other ranks."""
    try:
        before = read_plan(file)
    except (ValueError, OSError):  # none, or one of another version
        return None
    (ranks, now), (ranks_before, then) = (
        (one.candidate().num_devices, format_duration(one.predicted.step_s))
        for one in (plan, before)
    )
    if ranks == ranks_before:
        return None
    return f"a step is predicted to take {now} on {ranks}; it was {then} on {ranks_before}"


def _epoch(run: RunConfig, data: TrainingData) -> str:
    """Return the number and lengths of the sequences or samples of an epoch as text."""
    in_one = "" if run.data.sources is not None else " an epoch"  # each source has its own
    if run.data.samples == "stream":
        length = format_tokens(run.sequence.length)
        return f"{counted(data.num_samples, 'sequence')} of {length}{in_one}"
    lengths, left_out = data.table.lengths, data.table.num_left_out
    return (
        f"{format_count(data.num_samples)} samples of {int(lengths.min())} to "
        f"{int(lengths.max())} tokens{in_one}, mean {round(float(lengths.mean()))}"
        + (f" ({counted(left_out, 'document')} left out)" if left_out else "")
    )


def _mixture(mixture: Mixture) -> str:
    """Return what the run draws from each source as text."""
    drawn = (
        f"{source.name} {source.share:.1%} ({source.epochs:.2f} epochs)"
        for source in mixture.sources
    )
    return f"{', '.join(drawn)} of the {mixture.weights}"


def _cut(run: RunConfig, lengths: tuple[int, ...]) -> str:
    """Return the cuts of the sequences as text."""
    longest, shortest = max(lengths), min(lengths)
    if len(lengths) == 1:
        return f"nowhere: one subsequence of {longest} tokens"
    tokens = str(longest) if longest == shortest else f"{longest} to {shortest}"
    by = "boundaries" if run.sequence.boundaries is not None else run.sequence.partition
    return f"{len(lengths)} subsequences of {tokens} tokens (sequence.partition={by})"


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


# At the end


def report(checked: CheckedRun, outcome: TrainingOutcome, *, command: str) -> None:
    """Write the summary and the plots of a run, and print the report.

    A run whose steps were all done by an earlier call keeps its summary. The state is saved
    already, so a file that cannot be written only causes a warning.

    Args:
        checked: Run that was trained.
        outcome: Outcome of training.
        command: Command that resumes the run, named in the report of an interrupted run.
    """
    run, console, output = checked.job.run, checked.job.console, outcome.output
    draw_loss = partial(loss_plot, output / METRICS_FILE, terms=run.train.beside_cross_entropy)
    if _was_done(outcome):
        done = f"{output}: all {run.train.steps} steps were done before, nothing to do; "
        early = outcome.stopped_early is not None
        go_on = f"{done}raise train.steps, or train.epochs if the run file has it, to go on"
        text = _early_end(run, outcome) if early else go_on
        print_line(text, console)
        if not (output / LOSS_PLOT).exists():
            _write({LOSS_PLOT: draw_loss}, outcome, console=console)
        return
    steps = read_metrics(output / METRICS_FILE)
    summary = summarize(steps, checked, outcome)
    writers: dict[str, Writer] = {SUMMARY_FILE: partial(write_summary, summary)}
    if steps:
        writers[LOSS_PLOT] = draw_loss
    if (output / VALIDATION_FILE).exists():
        writers[POSITIONS_PLOT] = partial(validations_plot, output / VALIDATION_FILE)
    if outcome.expert_loads is not None and outcome.expert_loads.any():
        ran = outcome.done_steps - outcome.first_step
        writers[EXPERTS_PLOT] = partial(experts_plot, loads=outcome.expert_loads, steps=ran)
    if outcome.timelines is not None:
        writers |= _timeline_writers(outcome.timelines)
    missing = _write(writers, outcome, console=console)
    print_summary(summary, console=console)
    written = [name for name in _WRITTEN if name not in missing and (output / name).exists()]
    print_line(f"{output}: {', '.join(written)}", console)
    if outcome.stopped_early is not None:
        print_line(_early_end(run, outcome), console)
    if outcome.interrupted_by is not None:
        print_line(
            f"stopped by {outcome.interrupted_by} after step {outcome.done_steps} of "
            f"{run.train.steps}, {run.train.steps - outcome.done_steps} left; to go on:",
            console,
        )
        print_line(command, console, wraps=False)


def _early_end(run: RunConfig, outcome: TrainingOutcome) -> str:
    """Return why a run ended early, and how it goes on."""
    return (
        f"ended early after step {outcome.done_steps} of {run.train.steps}: "
        f"{outcome.stopped_early}; to go on, raise validation.stop_after"
    )


def _timeline_writers(step: StepTimelines) -> dict[str, Writer]:
    """Return the functions that draw planned and measured timeline, by the name of their file."""
    both = (step.planned, step.measured)
    writers: dict[str, Writer] = {TIMELINE_TRACE: partial(write_trace, timelines=both)}
    if sum(timeline.schedule.num_actions for timeline in both) <= _MOST_DRAWN:
        writers[TIMELINE_PLOT] = partial(write_png, timelines=both)
    return writers


def _write(
    writers: Mapping[str, Writer], outcome: TrainingOutcome, *, console: Console
) -> list[str]:
    """Write all files; warn of each that cannot be written, and return the names of these."""
    missing = []
    for name, write in writers.items():
        path = outcome.output / name
        try:
            write(path)
        except Exception as error:  # of any kind: the state of the run is saved
            missing.append(name)
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            told = "; ".join([why or type(error).__name__, *getattr(error, "__notes__", [])])
            print_line(f"warning: {path} cannot be written: {told}", console)
    if missing:
        writable = [name for name in missing if name in (SUMMARY_FILE, LOSS_PLOT)]
        again = writable and outcome.saved
        hint = f"; the same command writes {', '.join(writable)}" if again else ""
        done = "done and saved" if outcome.saved else "done"
        print_line(
            f"{outcome.output}: {done} after step {outcome.done_steps}, without "
            f"{', '.join(missing)}{hint}",
            console,
        )
    return missing


def _was_done(outcome: TrainingOutcome) -> bool:
    """Return whether this call ran nothing, and a summary of the earlier steps exists."""
    ran = outcome.done_steps > outcome.first_step or bool(outcome.validation_s)
    if ran or outcome.interrupted_by is not None:
        return False
    try:
        return read_summary(outcome.output / SUMMARY_FILE).steps == outcome.done_steps
    except (OSError, ValueError):
        return False


def summarize(
    steps: Sequence[StepMetrics], checked: CheckedRun, outcome: TrainingOutcome
) -> RunSummary:
    """Return the summary of a run, with figures of its last step if a timeline was measured."""
    plan, last = checked.plan, outcome.timelines
    return run_summary(
        steps,
        name=outcome.output.name,
        wall_s=outcome.wall_s,
        memory_bytes=_memory(outcome),
        phases_s=_phases(outcome),
        predicted_for=plan.hardware.name_and_origin,
        attention=checked.attention,
        copies=copies_summary(plan, outcome.copies),
        interrupted_by=outcome.interrupted_by,
        stopped_early=outcome.stopped_early,
        validation=_validation(checked, outcome),
        program_digest=None if last is None else last.measured.schedule.digest(),
        timeline=None if last is None else last.summary,
    )


def _validation(checked: CheckedRun, outcome: TrainingOutcome) -> ValidationSummary | None:
    """Return the figures of the validations of this call; None if it made none."""
    if checked.validation is None or outcome.progress is None:
        return None
    plan, base, progress = checked.validation.plan, outcome.base, outcome.progress
    rank = checked.job.mesh.at.pipeline
    predicted = max(
        own.memory[rank].total_bytes - own.memory[rank].communicators_bytes for own in plan.sets
    )
    held_bytes = base.held_bytes - base.warm_up_bytes + outcome.file_bytes
    return ValidationSummary(
        len(outcome.validation_s),
        Pair(plan.seconds, median(outcome.validation_s)),
        Pair(predicted, outcome.validation_peak_bytes - held_bytes),
        ".".join(checked.validation.watched),
        progress.best,
        progress.best_step,
    )


def _memory(outcome: TrainingOutcome) -> Mapping[str, Pair]:
    """Return (predicted, measured) bytes by bucket; {} if no step was run."""
    if outcome.most_planned is None:
        return {}
    all_bytes = outcome.peak_bytes - outcome.base.held_bytes + outcome.base.warm_up_bytes
    buckets = predicted_and_measured(
        outcome.most_planned, outcome.buckets, all_bytes=all_bytes - outcome.file_bytes
    )
    return {name: Pair(*values) for name, values in buckets.items()}


def _phases(outcome: TrainingOutcome) -> dict[str, Pair]:
    """Return (predicted, measured) median seconds of each phase; {} if no step was run."""
    planned, measured = outcome.planned_phases_s, outcome.phases_s
    if not measured:
        return {}
    return {
        phase: Pair(median(step[i] for step in planned), median(step[i] for step in measured))
        for i, phase in enumerate(_PHASES)
    }


def copies_summary(plan: ExecutionPlan, reports: Sequence[CopyReport]) -> CopiesSummary | None:
    """Return the figures of one step's copies.

    Returns None if the plan offloads nothing, or no step was run.

    Args:
        plan: Plan of the run.
        reports: Report of each step of this process. Rates and times are medians over the steps,
            bytes those of the last step.
    """
    if not plan.offloads_anything or not reports:
        return None
    last, predicted = reports[-1], plan.predicted
    out, back = copy_bytes_per_s(plan.candidate())
    host_bytes = max(
        sum(buckets.values()) - buckets[SAVED_IN_BACKGROUND]
        for buckets in plan.rank_tier_buckets("host")
    )
    return CopiesSummary(
        out_bytes=dict(last.out_bytes),
        back_bytes=dict(last.back_bytes),
        out_bytes_per_s=Pair(out, median(report.out_bytes_per_s for report in reports)),
        back_bytes_per_s=Pair(back, median(report.back_bytes_per_s for report in reports)),
        exposed_s=Pair(predicted.exposed_copy_s, median(report.exposed_s for report in reports)),
        host_bytes=Pair(host_bytes, last.host_bytes),
        disk_bytes=Pair(predicted.disk_peak_bytes, last.disk_bytes),
    )
