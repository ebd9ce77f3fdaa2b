"""Root of the ``sppo`` command and its subcommands.

The module of a subcommand is imported when the subcommand is called: ``sppo --help`` answers at
once, and planning does not wait for the import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from sppo.cli.command_group import CommandGroup, Group
from sppo.cli.exit_codes import exit_codes
from sppo.version import __version__

SUBCOMMANDS = {
    "train": "Train a run; the same command continues a killed or stopped run.",
    "eval": "Report the loss of a run's newest weights on data.eval_tokens, by position in the"
    " context.",
    "score": "Write the log-probability of every document, of its labels that count.",
    "track": "Send the records of a run to experiment trackers, those that it has not sent yet.",
    "solve": "Recommend degrees of parallelism, cuts, schedule and policy; predict time and"
    " memory.",
    "estimate": "Predict memory by bucket, as sppo train would plan the run; nothing is run.",
    "simulate": "Simulate, check and draw a pipeline schedule before it runs.",
    "bench": "Measure kernels and copies on the GPU, or on CPU and disk without one.",
    "doctor": "Report what training and planning find on this machine, and how to add what is"
    " missing.",
    "data": "Write and describe the token data that runs read.",
    "convert": "Convert weights from and to Hugging Face.",
    "config": "Make a run file, and look at one without running it.",
}
"""Help of each subcommand by its name, which is also that of its module, but for eval. A module has
an ``app``, or one function of its name."""


class _LazyGroup(Group):
    """Group that knows the names and help of its subcommands, and imports one when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of the subcommand, the subcommand, and its arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, subcommand(name) if name in SUBCOMMANDS else command, rest


def subcommand(name: str) -> Any:
    """Import a subcommand of ``sppo`` and return it."""
    module_name = "evaluate" if name == "eval" else name
    with exit_codes():  # there may be too little memory even for the libraries
        module = import_module(f"sppo.cli.{module_name}")
    inner = getattr(module, "app", None)
    if inner is None:
        inner = CommandGroup()
        inner.command(name)(getattr(module, module_name))
    return typer.main.get_command(inner)


app = CommandGroup(
    cls=_LazyGroup,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train transformers on sequences that do not fit, cut into subsequences.",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sppo {__version__}")
        raise typer.Exit


@app.callback()
def sppo(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_show_version,
        is_eager=True,
        help="Print the version.",
    ),
) -> None:
    """Train transformers on sequences that do not fit, cut into subsequences."""


def _named_only() -> None:
    """Stand for a subcommand that is not imported."""


for _name, _help in SUBCOMMANDS.items():
    app.command(_name, help=_help)(_named_only)
