"""Root of the ``sppo`` command and its subcommands.

Each subcommand imports its dependencies when it runs: ``sppo --help`` answers at once, and planning
does not wait for the import of torch.
"""

from __future__ import annotations

import typer

from sppo.cli import config, convert, data
from sppo.cli.bench import bench
from sppo.cli.command_group import CommandGroup
from sppo.cli.doctor import doctor
from sppo.cli.estimate import estimate
from sppo.cli.evaluate import evaluate
from sppo.cli.simulate import simulate
from sppo.cli.solve import solve
from sppo.cli.train import train

app = CommandGroup(
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train transformers on sequences that do not fit, cut into subsequences.",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from sppo.interface.version_lines import version_lines

        typer.echo("\n".join(version_lines()))
        raise typer.Exit


@app.callback()
def sppo(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_show_version,
        is_eager=True,
        help="Print the version, and what was built and found.",
    ),
) -> None:
    """Train transformers on sequences that do not fit, cut into subsequences."""


app.command("train")(train)
app.command("eval")(evaluate)
app.command("solve")(solve)
app.command("estimate")(estimate)
app.command("simulate")(simulate)
app.command("bench")(bench)
app.command("doctor")(doctor)
app.add_typer(data.app, name="data")
app.add_typer(convert.app, name="convert")
app.add_typer(config.app, name="config")
