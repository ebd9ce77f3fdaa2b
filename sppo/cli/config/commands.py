"""``sppo config``: make a run file, and look at one without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sppo.cli.arguments import Json, Overrides, RunFile
from sppo.cli.command_group import CommandGroup
from sppo.cli.config.new_run import new_run_file
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import print_json, print_screen, working
from sppo.config import ConfigError, load_run
from sppo.config.advice import log_run_warnings, run_hints
from sppo.config.huggingface.rope import ROPE_KEYS
from sppo.config.problems import Problem
from sppo.config.run import RunConfig
from sppo.config.yaml_file import format_yaml
from sppo.cost.trainable import check_trainable, counts_text, parameter_counts, trainable_of_run
from sppo.training.input_checks import run_file_problems

app = CommandGroup(help="Make a run file, and look at one without running it.")


@app.command()
def show(run_file: RunFile, overrides: Overrides = None, json_output: Json = False) -> None:
    """Print the complete configuration: presets expanded, defaults filled in."""
    with exit_codes():
        run = load_run(run_file, overrides or ())
    scaling = run.model.rope_scaling
    of_other_types = {key for keys in ROPE_KEYS.values() for key in keys}
    of_other_types -= set(ROPE_KEYS[scaling.type] if scaling is not None else ())
    hidden: dict[str, Any] = {"model": {"rope_scaling": of_other_types}}
    if run.train.epochs is not None:  # the number of steps is known when the run starts
        hidden["train"] = {"steps": True}
    values = run.model_dump(mode="json", exclude=hidden)
    if json_output:
        print_json(values, indent=2)
    else:
        typer.echo(format_yaml(values), nl=False)


@app.command()
def check(run_file: RunFile, overrides: Overrides = None, json_output: Json = False) -> None:
    """Report every problem of a run file at once; exit code 2 if there is one.

    Checks the keys and values of the file, then, if these are valid, what they name: data, weights,
    output, disk, hardware and degrees, as sppo train does. Does not check whether the run fits into
    memory; sppo train and sppo solve do.
    """
    with exit_codes():
        problems, hints = _problems_and_hints(run_file, overrides or ())
    if json_output:
        listed = [asdict(problem) for problem in problems]
        print_json({"valid": not problems, "problems": listed, "hints": hints}, indent=2)
        if problems:
            raise typer.Exit(2)
        return
    with exit_codes():
        if problems:
            raise ConfigError(str(run_file), problems)
    typer.echo(f"{run_file}: no problems")
    print_screen((f"hint: {hint}" for hint in hints), Console())


@app.command()
def parameters(run_file: RunFile, overrides: Overrides = None, json_output: Json = False) -> None:
    """List the parameters of a run, with their shapes, and which of them train.

    The globs of train.only and optimizer.groups match these names. With an adapter, its factors
    are listed behind the weights of the model.

        sppo config parameters run.yaml | grep norm
    """
    with exit_codes():
        run = load_run(run_file, overrides or ())
        check_trainable(run)
    trainable = trainable_of_run(run)
    shapes = trainable.parameter_shapes(run.model)
    trained, total = parameter_counts(run.model, trainable)
    if json_output:
        listed = [
            {"name": name, "shape": list(shape), "trains": trainable.trains(name)}
            for name, shape in shapes.items()
        ]
        print_json({"parameters": listed, "trained": trained, "total": total})
        return
    width = max(map(len, shapes))
    for name, shape in shapes.items():
        sides, fate = " x ".join(map(str, shape)), "trains" if trainable.trains(name) else "frozen"
        typer.echo(f"{name:<{width}}  {sides:<16}{fate}")
    typer.echo(counts_text(run))


@app.command()
def new(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="sft|pretrain|extend",
            help="sft: fine-tune on whole documents, such as conversations; pretrain: train on the"
            " stream of all documents; extend: on longer sequences than the model knows.",
        ),
    ],
    overrides: Overrides = None,
    model: Annotated[
        str,
        typer.Option(metavar="DIR|PRESET", help="Directory of a Hugging Face model, or a preset."),
    ] = "",
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Token data, written by sppo data prepare.")
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Held-out token data, for a validation while training."),
    ] = None,
) -> None:
    """Print a commented run file for a model and data, which sppo train accepts as it is.

    Length and number of steps follow from the data, degrees of parallelism from sppo solve, for
    this machine or the one that hardware.preset names.

        sppo config new sft --model models/qwen3-8b --data data/chat > run.yaml
        sppo config new sft --model models/qwen3-8b --data data/chat adapter.rank=16 > lora.yaml
    """
    with exit_codes():
        if not model or data is None:
            raise ValueError(
                "--model DIR and --data DIR are needed: what is trained, and on which data"
            )
        with working("searching for the fastest plan"):
            text = new_run_file(
                kind, model=model, data=data, held_out=held_out, overrides=overrides or ()
            )
    typer.echo(text, nl=False)


def _problems_and_hints(
    run_file: Path, overrides: Sequence[str]
) -> tuple[Sequence[Problem], list[str]]:
    try:
        run = load_run(run_file, overrides)
    except ConfigError as error:
        return error.problems, []
    log_run_warnings(run)
    return run_file_problems(run), list(run_hints(run))


@app.command()
def schema() -> None:
    """Print the JSON schema of run files, for editors and for reference."""
    description = RunConfig.model_json_schema()
    # A preset or from_hf fills in the keys that a model section leaves out: none is required.
    description["$defs"]["ModelConfig"].pop("required", None)
    print_json(description, indent=2)
