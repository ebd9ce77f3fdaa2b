"""``sppo bench``: measure this machine and write a hardware description for plans."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sppo.cli.arguments.bench_request import BenchKeys, asked_grids
from sppo.cli.arguments.common import Json
from sppo.cli.command_group import CommandGroup, KeyCommand
from sppo.cli.exit_codes import exit_codes
from sppo.cli.output.bench_progress import BenchDisplay
from sppo.cli.output.printing import emit
from sppo.config import load_run
from sppo.config.key_values import read_keys
from sppo.hardware.description import HardwareSpec
from sppo.hardware.file import hardware_json
from sppo.output_file import check_output_files, write_json

if TYPE_CHECKING:  # these modules import torch, which help does not wait for
    from sppo.bench.suite import CopySetup, Measurements

app = CommandGroup()


class BenchCommand(KeyCommand):
    """Command whose keys are precisions and shapes."""

    keys = BenchKeys


class Subject(StrEnum):
    """Subject of a measurement: one kind of kernel, message or copy, or all of them."""

    GEMM = "gemm"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
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

    @property
    def copies(self) -> bool:
        """True if this subject includes measurements of copies."""
        return self in (Subject.PCIE, Subject.OVERLAP, Subject.ALL)


@app.command("bench", cls=BenchCommand)
def bench(
    subject: Annotated[
        Subject,
        typer.Argument(
            metavar="SUBJECT",
            help="gemm, attention, elementwise, messages (between ranks on the CPU), pcie (copies "
            "to host memory, or to disk), overlap (copies behind compute), or all of them.",
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Precisions and shapes to measure, values separated by commas.",
            show_default=False,
        ),
    ] = None,
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
            help="Let copies run behind a layer of this run's model, in its precision.",
            show_default=False,
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Measure kernels and copies on the GPU, or on CPU and disk without one.

    Takes minutes, and longer beside other programs, which also make the figures unsteady. A run
    file uses the written description with `hardware: {file: hardware.json}`.

        sppo bench all -o hardware.json

        sppo bench attention queries=1Ki keys=4Ki,16Ki heads=8/2,8 dtype=bf16
    """
    console = Console(stderr=json_output)
    with exit_codes():
        asked = read_keys(BenchKeys, words or ())
        check_output_files({"-o": output}, inputs=[] if run is None else [run])
        spec, found = _measure(
            subject,
            asked,
            quick=quick,
            disk=disk,
            run_file=run,
            output=output,
            console=console,
        )
        if output is not None:
            write_json(output, hardware_json(spec))
    from sppo.cli.output.bench_report import BenchReport

    emit(BenchReport(found, spec, output), as_json=json_output)


def _measure(
    subject: Subject,
    asked: BenchKeys,
    *,
    quick: bool,
    disk: Path | None,
    run_file: Path | None,
    output: Path | None,
    console: Console,
) -> tuple[HardwareSpec, Measurements]:
    """Check the request, then run the measurements.

    Returns:
        The updated description of this machine, and the measurements.
    """
    from sppo.bench.hardware_description import (
        describe,
        described_machine,
        starting_description,
    )
    from sppo.bench.memory import check_memory
    from sppo.bench.suite import BenchRequest, device_to_measure, measure

    device = device_to_measure()
    parts = subject.parts(device)
    asked.check_subjects(subject.value, parts)
    grids = asked_grids(asked, device=device, quick=quick, for_plans=output is not None)
    copying = _copying(subject, device=device, disk=disk, run_file=run_file, quick=quick)
    base = starting_description(described_machine(device), path=output)
    check_memory(grids, subjects=parts, device=device, dtypes=asked.dtype)
    with BenchDisplay(console) as display:
        request = BenchRequest(device, asked.dtype, quick, grids, copying)
        found = measure(parts, request, watcher=display)
    return describe(base, found), found


def _copying(
    subject: Subject, *, device: str, disk: Path | None, run_file: Path | None, quick: bool
) -> CopySetup | None:
    """Return the target of copies and the layer that they overlap; None if no copies are measured.

    Raises:
        ValueError: An option of copies was given and no copies are measured, the run file is
            invalid, or the directory does not exist.
        OSError: The disk has too little free space.
    """
    from sppo.bench.disk import check_disk
    from sppo.bench.overlap import MeasuredLayer, default_layer
    from sppo.bench.suite import CopySetup

    if not subject.copies:
        for option, path in (("--disk", disk), ("--run", run_file)):
            if path is not None:
                raise ValueError(
                    f"{option} {path}: only sppo bench pcie, overlap and all use it; "
                    f"leave it out of sppo bench {subject.value}"
                )
        return None
    loaded = None if run_file is None else load_run(run_file, ())
    if device == "cpu" and disk is None:
        named = None if loaded is None else loaded.activations.disk
        disk = Path(named or ".")
    if disk is not None:
        check_disk(disk, quick=quick)
    if loaded is None:
        return CopySetup(disk, default_layer(device))
    name = loaded.model.preset or loaded.model.from_hf or str(run_file)
    return CopySetup(disk, MeasuredLayer(name, loaded.model, loaded.train.dtype))
