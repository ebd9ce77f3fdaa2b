"""``sppo bench``: measure this machine and write a hardware description for plans."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sppo.cli.arguments import Json
from sppo.cli.command_group import CommandGroup
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import emit
from sppo.config import load_run
from sppo.hardware.file import hardware_json
from sppo.output_file import check_output_files, write_json
from sppo.report.display import Display

if TYPE_CHECKING:
    from sppo.bench.suite import BenchRequest

_COPIES = ("pcie", "overlap")
_OF_A_RUN = ("gemm", "attention", "elementwise", "rule", *_COPIES)
"""Subjects that depend on the precision or the model of a run."""


class Subject(StrEnum):
    """Subject of a measurement: one kind of kernel, message or copy, or all of them."""

    GEMM = "gemm"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    RULE = "rule"
    MESSAGES = "messages"
    PCIE = "pcie"
    OVERLAP = "overlap"
    ALL = "all"

    def parts(self, device: str) -> tuple[str, ...]:
        """Return the single subjects that this subject stands for on `device`.

        Args:
            device: "cpu" or "cuda".

        Raises:
            ValueError: The subject is ``messages`` and the device is a GPU.
        """
        if self is Subject.MESSAGES and device != "cpu":
            raise ValueError(
                "sppo bench messages measures ranks on the CPU, and ranks here compute on GPUs: "
                "hide those with CUDA_VISIBLE_DEVICES= to measure the CPU"
            )
        if self is not Subject.ALL:
            return (self.value,)
        left_out = (Subject.ALL, Subject.MESSAGES) if device != "cpu" else (Subject.ALL,)
        return tuple(subject.value for subject in Subject if subject not in left_out)


app = CommandGroup()


@app.command("bench")
def bench(
    subject: Annotated[
        Subject,
        typer.Argument(
            metavar="SUBJECT",
            help="gemm, attention, elementwise, rule (of linear attention), messages (between "
            "ranks on the CPU), pcie (copies to host memory, or to disk), overlap (copies behind "
            "compute), or all of them.",
        ),
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
    quick: Annotated[
        bool, typer.Option("--quick", help="Few shapes and rounds: a trial, not to plan with.")
    ] = False,
    disk: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Measure the disk that holds DIR: without a GPU always, then by default the run's "
            "activations.disk, else the current directory. Takes 1 GiB while it runs.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.yaml",
            help="Measure in the precision of this run, attention with the heads of its model, and "
            "copies behind one of its layers.",
            show_default=False,
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Measure kernels and copies on the GPU, or on CPU and disk without one.

    Takes minutes, and longer beside other programs, which also make the figures unsteady. A run
    file uses the written description with `hardware: {file: hardware.json}`.

        sppo bench all -o hardware.json

        sppo bench attention --run run.yaml
    """
    with exit_codes():
        check_output_files({"-o": output}, inputs=[] if run is None else [run])
        from sppo.bench.hardware_description import (
            describe,
            described_machine,
            starting_description,
        )
        from sppo.bench.suite import device_to_measure, measure
        from sppo.cli.bench_tables import bench_json, bench_screen

        device = device_to_measure()
        parts = subject.parts(device)
        for option, path, users in (("--disk", disk, _COPIES), ("--run", run, _OF_A_RUN)):
            if path is not None and not set(users).intersection(parts):
                raise ValueError(
                    f"{option} {path}: only sppo bench {', '.join(users)} and all use it; leave it "
                    f"out of sppo bench {subject.value}"
                )
        request = _request(device, parts, run=run, disk=disk, quick=quick)
        base = starting_description(described_machine(device), path=output)
        with BenchDisplay(Console(stderr=json_output)) as display:
            found = measure(parts, request, watcher=display)
        spec = describe(base, found)
        if output is not None:
            write_json(output, hardware_json(spec))
    emit(
        lambda: bench_json(found, spec, output),
        lambda: bench_screen(found, output),
        as_json=json_output,
    )


def _request(
    device: str, parts: Sequence[str], *, run: Path | None, disk: Path | None, quick: bool
) -> BenchRequest:
    """Return the request to measure subjects.

    Raises:
        ValueError: The run file cannot be used, or the directory does not exist.
        OSError: The disk lacks the space.
    """
    from sppo.bench.disk import check_disk
    from sppo.bench.suite import BenchRequest

    of_run = None if run is None else load_run(run, ())
    if device == "cpu" and disk is None:
        disk = Path((of_run.activations.disk if of_run is not None else None) or ".")
    if disk is not None and set(_COPIES).intersection(parts):
        check_disk(disk, quick=quick)
    return BenchRequest(device, quick, of_run, disk)


class BenchDisplay(Display):
    """:class:`sppo.bench.timing.Watcher` that shows a bar on a terminal, else a line per subject.

    Args:
        console: Console to write to.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        if self._progress is not None:
            self._task = self._progress.add_task("", total=None)

    def begin(self, subject: str, *, total: int) -> None:
        """Show the bar, or print the line, of a subject with ``total`` timings."""
        if self._progress is None:
            self._console.print(f"measuring {subject}: {total} timings", highlight=False)
        else:
            self._progress.reset(self._task, total=total, description=subject)

    def advance(self) -> None:
        """Advance the bar by one timing."""
        if self._progress is not None:
            self._progress.advance(self._task)
