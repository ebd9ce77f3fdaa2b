"""``sppo train``: train a run, or go on with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sppo.cli.arguments import Overrides, RunFile
from sppo.cli.exit_codes import exit_codes, fail
from sppo.cli.stop_signals import Stopped
from sppo.parallel.failures import stopped_exit_code

if TYPE_CHECKING:
    from rich.console import Console

    from sppo.config import RunConfig
    from sppo.parallel.environment import RankEnvironment
    from sppo.planning.plan import ExecutionPlan
    from sppo.training.device import Device
    from sppo.training.preflight import Preflight

PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", help="Follow this plan of sppo solve.", show_default=False),
]


_GOES_ON = ": the same command goes on from the newest checkpoint, or begins again"


def train(run_file: RunFile, overrides: Overrides = None, plan: PlanFile = None) -> None:
    """Train; the same command goes on where a killed or stopped run left off.

    On the machine's GPUs if torch sees any and hardware names no CPU, each rank on one of its own.
    With degrees of parallelism above 1 it starts that many processes on this machine, unless it is
    one of them already, started by torchrun or srun. Writes metrics.jsonl, loss.png,
    run_summary.json and checkpoints into train.output.

        sppo train configs/run/tiny_cpu.yaml train.steps=20
        sppo train configs/run/tiny_cpu.yaml parallel.pipeline_parallel_degree=2
    """
    import os

    from sppo.config import load_run

    with exit_codes(), _stops_say(_GOES_ON):
        run = load_run(run_file, overrides or ())
        from sppo.parallel.environment import keep_torch_quiet, rank_environment

        keep_torch_quiet(os.environ)
        environment = rank_environment(os.environ)
        _check_room_for_libraries(run, starts_ranks=environment is None)
        from sppo.training.choose_device import choose_device, device_kind
        from sppo.training.preflight import given_plan
        from sppo.training.ranks import mesh_shape

        chosen = None
        if plan is not None:
            run, chosen = given_plan(run, plan, kind=device_kind(run))
        num_ranks = mesh_shape(run).num_ranks
        if environment is None and num_ranks > 1:
            device = choose_device(run, local_ranks=num_ranks)
            _start_ranks(run, chosen, num_ranks=num_ranks, device=device)
        else:
            device = choose_device(run, environment=environment)
            _train_as_rank(run, chosen, environment, device=device)


def _check_room_for_libraries(run: RunConfig, *, starts_ranks: bool) -> None:
    """Refuse, before torch is loaded, to load it where it does not fit, once for every process."""
    from sppo.kernels.native.machine_memory import check_room_for_libraries

    degrees = run.parallel
    ranks = degrees.data_parallel_degree * degrees.pipeline_parallel_degree
    ranks *= degrees.sequence_parallel_degree
    check_room_for_libraries(processes=1 + ranks if starts_ranks and ranks > 1 else 1)


@contextmanager
def _stops_say(advice: str) -> Iterator[None]:
    """Let a signal that ends the process within be told with ``advice``."""
    try:
        yield
    except Stopped as stopped:
        stopped.advice = advice
        raise


def _start_ranks(
    run: RunConfig, plan: ExecutionPlan | None, *, num_ranks: int, device: Device
) -> None:
    """Check everything, then run this very command once for every rank."""
    import os
    import sys

    from rich.console import Console

    from sppo.hardware.this_machine import count_cores
    from sppo.parallel.launch import run_ranks
    from sppo.parallel.rendezvous import allow_connections
    from sppo.report.display import log_to
    from sppo.training.preflight import check_before_training

    console = Console()
    log_to(console)
    allow_connections(num_ranks)
    preflight = check_before_training(
        run, plan=plan, local_ranks=num_ranks, device=device, starts_ranks=True
    )
    _announce(run, preflight, console, device=device)
    code = run_ranks(
        [sys.executable, "-m", "sppo", *sys.argv[1:]],
        num_ranks=num_ranks,
        environ=os.environ,
        threads_per_rank=max(1, count_cores() // num_ranks),
    )
    raise typer.Exit(code)


def _train_as_rank(
    run: RunConfig,
    plan: ExecutionPlan | None,
    environment: RankEnvironment | None,
    *,
    device: Device,
) -> None:
    """Train as one rank of the run, or alone."""
    import signal

    from rich.console import Console

    from sppo.report.display import log_to
    from sppo.training.interruption import StopRequest
    from sppo.training.libraries import load_libraries
    from sppo.training.nonfinite import NonFiniteError
    from sppo.training.preflight import check_before_training
    from sppo.training.ranks import joined
    from sppo.training.results import report
    from sppo.training.trainer import train as train_run

    is_main = environment is None or environment.rank == 0
    console = Console(quiet=not is_main)
    if is_main:
        log_to(console)
    with joined(run, environment, device=device) as ranks:
        local = ranks.local_count
        if device.kind == "cpu":
            load_libraries()
        ranks.peers.barrier()  # memory is free only once every rank has what all will have
        decided = ranks.decided_by_main(
            lambda: check_before_training(run, plan=plan, local_ranks=local, device=device).plan
        )
        preflight = check_before_training(run, plan=decided, local_ranks=local, device=device)
        ranks.peers.barrier()  # what is free is looked at before any rank takes some
        if environment is None or environment.launcher != "sppo":
            _announce(run, preflight, console, device=device)
        try:
            outcome = train_run(run, preflight, console=console, ranks=ranks, device=device)
        except NonFiniteError as error:
            fail(str(error), code=1)
        if is_main:
            # Once all steps are done a signal comes too late to change the exit code.
            with StopRequest() if outcome.interrupted_by is None else nullcontext():
                report(run, preflight, outcome, console=console, command=_command(environment))
    if outcome.interrupted_by is not None:
        raise typer.Exit(stopped_exit_code(signal.Signals[outcome.interrupted_by]))


def _command(environment: RankEnvironment | None) -> str:
    """Return how to call this very command again, as people write it."""
    import shlex
    import sys

    if environment is None or environment.launcher == "sppo":
        return shlex.join(["sppo", *sys.argv[1:]])
    return "the same command"


def _announce(run: RunConfig, preflight: Preflight, console: Console, *, device: Device) -> None:
    """What is about to happen, before it does."""
    import torch

    from sppo.cost.parameters import num_parameters
    from sppo.kernels.native.extension import describe
    from sppo.units import format_bytes, format_count

    memory = preflight.plan.stages[0].memory.device
    parallel = run.parallel
    degrees = (
        ("data", parallel.data_parallel_degree),
        ("pipeline", parallel.pipeline_parallel_degree),
        ("sequence", parallel.sequence_parallel_degree),
    )
    parallelism = ", ".join(f"{name} {degree}" for name, degree in degrees if degree > 1)
    name = run.model.preset or run.model.from_hf or "model"
    data = preflight.data
    lines = (
        f"model     {name}: {format_count(num_parameters(run.model))} parameters, "
        f"{run.train.dtype} on {device.describe()}, torch {torch.__version__}",
        f"data      {format_count(data.data.num_tokens)} tokens in {data.data.num_documents} "
        f"documents: {_epoch(preflight)}" + _ids_made_elsewhere(run, preflight),
        *_loss(run),
        *_positions(run),
        *_cut(run, preflight),
        *([f"parallel  {parallelism}; schedule {preflight.plan.schedule}"] if parallelism else ()),
        f"policy    {preflight.plan.policy}: predicted peak {format_bytes(memory.total_bytes)} "
        f"({format_bytes(memory.activations_bytes)} activations, "
        f"{format_bytes(memory.kv_bytes + memory.kv_gradients_bytes)} K/V)",
        *_state(run, preflight),
        *_offloads(run, preflight),
        f"library   {describe()}",
        f"output    {run.train.output}",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _epoch(preflight: Preflight) -> str:
    """What an epoch has."""
    import numpy as np

    from sppo.data.samples import DocumentSamples
    from sppo.units import format_count, format_tokens

    data = preflight.data
    if not isinstance(data, DocumentSamples):
        return f"{data.num_sequences} sequences of {format_tokens(data.length)} an epoch"
    lengths, left_out = data.table.lengths, data.table.num_left_out
    middle = np.percentile(lengths, (50, 90, 99), method="inverted_cdf").tolist()
    return (
        f"{format_count(data.num_samples)} samples of {int(lengths.min())} to "
        f"{int(lengths.max())} tokens an epoch, mean {round(float(lengths.mean()))}, "
        + ", ".join(f"p{share} {value}" for share, value in zip((50, 90, 99), middle, strict=True))
        + (f" ({left_out} documents left out)" if left_out else "")
    )


def _cut(run: RunConfig, preflight: Preflight) -> tuple[str, ...]:
    """How sequences are cut, or samples packed."""
    from sppo.data.samples import DocumentSamples
    from sppo.units import format_count, format_duration

    data, lengths = preflight.data, preflight.plan.lengths
    if isinstance(data, DocumentSamples):
        packed = (
            f"cut       samples into subsequences of at most about {max(lengths)} tokens, packed "
            "anew for every step"
        )
        if preflight.next_step is None:  # all steps are done
            return (packed,)
        number, step = preflight.next_step.number, preflight.next_step.plan
        return (
            packed,
            f"step      number {number}: {format_count(step.num_samples)} samples, "
            f"{format_count(step.tokens)} tokens in {step.num_split} split, "
            f"{step.num_batched} batched and {step.num_hybrid} hybrid subsequences; predicted "
            f"{format_duration(step.step_s)}, {step.bubble_fraction:.1%} idle",
        )
    if len(lengths) == 1:
        return (f"cut       nowhere: one subsequence of {lengths[0]} tokens",)
    return (
        f"cut       {len(lengths)} subsequences of {max(lengths)} to {min(lengths)} tokens "
        f"(sequence.partition={_cut_by(run)})",
    )


def _state(run: RunConfig, preflight: Preflight) -> tuple[str, ...]:
    """Where the training state lives, if not all of it on the device."""
    from sppo.cli.output.solve_text import state_text
    from sppo.units import format_bytes

    tiers = preflight.plan.state_tiers
    if not tiers.leaves_device:
        return ()
    behind = max(rank.tier_state_bytes for rank in preflight.plan.rank_memory)
    where = f" ({run.activations.disk})" if preflight.plan.tier == "disk" else ""
    return (f"state     {state_text(tiers)}{where}: {format_bytes(behind)}",)


def _ids_made_elsewhere(run: RunConfig, preflight: Preflight) -> str:
    """What nobody could check about ready-made ids for weights that know a vocabulary."""
    unknown = preflight.data.data.meta.tokenizer.name == "ids" and run.model.from_hf is not None
    return f"; ready-made ids, taken for those of {run.model.from_hf}" if unknown else ""


def _positions(run: RunConfig) -> tuple[str, ...]:
    """A warning where published weights meet positions that they have never seen."""
    length, reach = run.sequence.length, run.model.context_reach
    if run.model.from_hf is None or reach is None or length <= reach:
        return ()
    factor = -(-length // reach)
    scaling = f"{{type: yarn, factor: {factor}, original_max_positions: {reach}}}"
    return (
        f"warning   sequence.length {length} is beyond the {reach} positions of these weights, "
        f"which have never seen such; stretch them with e.g. model.rope_scaling={scaling}",
    )


def _loss(run: RunConfig) -> tuple[str, ...]:
    """What the loss is, where it is more than the cross entropy."""
    terms = run.train.beside_cross_entropy
    return (
        (f"loss      cross entropy with {terms}; sppo eval reports the cross entropy alone",)
        if terms
        else ()
    )


def _offloads(run: RunConfig, preflight: Preflight) -> tuple[str, ...]:
    """What goes to the next tier, if anything does."""
    from sppo.units import format_bytes

    plan = preflight.plan
    if not plan.offloads_anything:
        return ()
    ratios = plan.predicted.offload_ratios
    size = max(rank.tier_activations_bytes for rank in plan.rank_memory)
    where = "host memory" if plan.tier == "host" else run.activations.disk
    what = f"{min(ratios):.0%} to {max(ratios):.0%} of what a subsequence saves"
    if plan.stages[0].kv == "offloaded":
        others = len(plan.stages) - plan.pipeline_parallel_degree
        what += f"; K and V of {others} of {len(plan.stages)} stages"
    return (f"offload   {format_bytes(size)} to {where} and back: {what}",)


def _cut_by(run: RunConfig) -> str:
    return "boundaries" if run.sequence.boundaries is not None else run.sequence.partition
