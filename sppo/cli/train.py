"""``sppo train``: train a run, or go on with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sppo.cli.arguments import Overrides, RunFile
from sppo.cli.exit_codes import exit_codes, fail

if TYPE_CHECKING:
    from rich.console import Console

    from sppo.config import RunConfig
    from sppo.train.preflight import Preflight

PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", help="Follow this plan of sppo solve.", show_default=False),
]


def train(run_file: RunFile, overrides: Overrides = None, plan: PlanFile = None) -> None:
    """Train; the same command goes on where a killed or stopped run left off.

    Writes metrics.jsonl, loss.png, run_summary.json and checkpoints into train.output.

        sppo train configs/run/tiny_cpu.yaml train.steps=20
    """
    import logging

    from rich.console import Console

    from sppo.config import load_run

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    console = Console()
    with exit_codes():
        run = load_run(run_file, overrides or ())
        from sppo.train.nonfinite import NonFiniteError
        from sppo.train.preflight import check_before_training
        from sppo.train.report import report
        from sppo.train.trainer import train as train_run

        preflight = check_before_training(run, plan_file=plan)
        _announce(run, preflight, console)
        try:
            outcome = train_run(run, preflight, console=console)
        except NonFiniteError as error:
            fail(str(error), code=1)
        report(run, preflight, outcome, console=console)


def _announce(run: RunConfig, preflight: Preflight, console: Console) -> None:
    """What is about to happen, before it does."""
    import torch

    from sppo.kernels.extension import describe
    from sppo.planning.parameters import num_parameters
    from sppo.units import format_bytes, format_count, format_tokens

    lengths = preflight.plan.lengths
    memory = preflight.plan.stages[0].memory.device
    cut = (
        f"cut       {len(lengths)} subsequences of {max(lengths)} to {min(lengths)} tokens "
        f"(sequence.partition={_cut_by(run)})"
        if len(lengths) > 1
        else f"cut       nowhere: one subsequence of {lengths[0]} tokens"
    )
    name = run.model.preset or run.model.from_hf or "model"
    data = preflight.data
    lines = (
        f"model     {name}: {format_count(num_parameters(run.model))} parameters, "
        f"{run.train.dtype} on cpu with {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}",
        f"data      {format_count(data.data.num_tokens)} tokens in {data.data.num_documents} "
        f"documents: {data.num_sequences} sequences of {format_tokens(data.length)} an epoch",
        cut,
        f"keep      {preflight.plan.policy}: predicted peak {format_bytes(memory.total_bytes)} "
        f"({format_bytes(memory.activations_bytes)} activations, "
        f"{format_bytes(memory.kv_bytes + memory.kv_gradients_bytes)} K/V)",
        *_moves(run, preflight),
        f"native    {describe()}",
        f"output    {run.train.output}",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _moves(run: RunConfig, preflight: Preflight) -> tuple[str, ...]:
    """What goes to the disk, if anything does."""
    from sppo.units import format_bytes

    plan = preflight.plan
    if not plan.moves_anything:
        return ()
    size, ratios = plan.predicted.disk_peak_bytes, plan.predicted.offload_ratios
    return (
        f"move      {format_bytes(size)} to {run.activations.disk} and back: {min(ratios):.0%} to "
        f"{max(ratios):.0%} of what a subsequence saves",
    )


def _cut_by(run: RunConfig) -> str:
    return "boundaries" if run.sequence.boundaries is not None else run.sequence.partition
