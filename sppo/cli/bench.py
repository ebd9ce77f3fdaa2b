"""``sppo bench``: measure this machine, and write the description that plans are made with."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sppo.cli.arguments import Json
from sppo.cli.exit_codes import exit_codes

if TYPE_CHECKING:
    from sppo.bench.suite import Measurements
    from sppo.planning.hardware import HardwareSpec

_DTYPES = ("bf16", "fp32")


class Subject(StrEnum):
    """What can be measured."""

    GEMM = "gemm"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    ALL = "all"

    @property
    def parts(self) -> tuple[str, ...]:
        """The subjects it stands for."""
        if self is Subject.ALL:
            return tuple(subject.value for subject in Subject if subject is not Subject.ALL)
        return (self.value,)


def bench(
    subject: Annotated[
        Subject,
        typer.Argument(metavar="SUBJECT", help="gemm, attention, elementwise, or all of them."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write the hardware description here; one of this machine is brought up to date.",
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the measured rates here.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="LIST", help="Precisions, separated by commas.")
    ] = ",".join(_DTYPES),
    quick: Annotated[
        bool, typer.Option("--quick", help="Few shapes and rounds: a trial, not to plan with.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Measure kernels on the GPU if there is one, else on the CPU; a minute or less on a laptop.

    The file is what `hardware: {file: hardware.json}` in a run file reads.

        sppo bench all -o hardware.json --png hardware.png
    """
    from rich.console import Console

    console = Console(stderr=json_output)
    with exit_codes():
        dtypes = _dtypes(dtype)
        for option, path in (("-o", output), ("--png", png)):
            if path is not None:
                _check_writable(option, path)
        from sppo.bench.description import describe, described_machine, starting_description
        from sppo.bench.display import BenchDisplay
        from sppo.bench.suite import device_to_measure, measure

        device = device_to_measure()
        base = starting_description(described_machine(device), path=output)
        with BenchDisplay(console) as display:
            found = measure(
                subject.parts, device=device, dtypes=dtypes, quick=quick, watcher=display
            )
        spec = describe(base, found)
        _write(spec, found, output=output, png=png)
    _print(spec, found, output=output, png=png, as_json=json_output)


def _dtypes(text: str) -> tuple[str, ...]:
    """Precisions of a list such as ``bf16,fp32``, each once.

    Raises:
        ValueError: one that is not measured.
    """
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    unknown = [name for name in names if name not in _DTYPES]
    if unknown or not names:
        raise ValueError(
            f"--dtype {text!r}: {unknown[0] if unknown else 'nothing'} is not one of "
            f"{', '.join(_DTYPES)}; separate them by commas"
        )
    return names


def _check_writable(option: str, path: Path) -> None:
    """Find out before measuring whether `path` can be written.

    Raises:
        ValueError: it cannot, and why.
    """
    import os

    if path.is_dir():
        raise ValueError(f"{option} {path}: is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: the directory {path.parent} cannot be written to")


def _write(
    spec: HardwareSpec, found: Measurements, *, output: Path | None, png: Path | None
) -> None:
    if output is not None:
        from sppo.planning.hardware_file import hardware_json
        from sppo.train.durable_files import write_json

        write_json(output, hardware_json(spec))
    if png is not None:
        from sppo.bench.picture import write_picture

        write_picture(png, name=spec.name, measurements=found)


def _print(
    spec: HardwareSpec,
    found: Measurements,
    *,
    output: Path | None,
    png: Path | None,
    as_json: bool,
) -> None:
    """One JSON object, or tables for people."""
    if as_json:
        import json

        from sppo.planning.hardware_file import hardware_json

        report = {
            "device": found.device,
            "wall_s": found.wall_s,
            "num_timings": len(found.spreads),
            "worst_spread": max(found.spreads),
            "output": None if output is None else str(output),
            "hardware": hardware_json(spec),
        }
        typer.echo(json.dumps(report, allow_nan=False))
        return
    from rich.console import Console

    from sppo.bench.report import print_measurements

    console = Console()
    print_measurements(found, console=console)
    for path in (output, png):
        if path is not None:
            typer.echo(f"written {path}")
    if output is not None:
        typer.echo(f"in a run file: hardware: {{file: {output}}}")
