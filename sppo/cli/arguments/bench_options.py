"""Options of ``sppo bench`` other than shapes, with their help texts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

DTYPES = ("bf16", "fp32")
ALL_DTYPES = ",".join(DTYPES)


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


SubjectArgument = Annotated[
    Subject,
    typer.Argument(
        metavar="SUBJECT",
        help="gemm, attention, elementwise, messages (between ranks on the CPU), pcie (copies "
        "to host memory, or to disk), overlap (copies behind compute), or all of them.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Write the hardware description here; one of this machine is brought up to date.",
    ),
]
Dtypes = Annotated[str, typer.Option(metavar="LIST", help="Precisions, separated by commas.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Few shapes and rounds: a trial, not to plan with.")
]
DiskOfCopies = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Measure the disk that holds DIR: without a GPU always, then by default the run's "
        "activations.disk, else the current directory. Takes 1 GiB while it runs.",
        show_default=False,
    ),
]
RunOfLayer = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN.yaml",
        help="Let copies run behind a layer of this run's model, in its precision.",
        show_default=False,
    ),
]
