"""``sppo bench``: measure this machine and write a hardware description for plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import AfterValidator, BeforeValidator, Field
from rich.console import Console

from sppo.cli.arguments import Json
from sppo.cli.command_group import CommandGroup, key_command
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import emit
from sppo.config import load_run
from sppo.config.base import ComputeDtype, Section, Size
from sppo.config.key_values import comma_list, read_keys
from sppo.config.problems import nearest
from sppo.hardware.file import hardware_json
from sppo.output_file import check_output_files, write_json
from sppo.report.display import Display
from sppo.units import format_tokens, parse_size

if TYPE_CHECKING:  # these modules import torch, which help does not wait for
    from sppo.bench.attention_grid import AttentionGrid
    from sppo.bench.gemm import GemmGrid
    from sppo.bench.suite import CopySetup, Grids

_Grid = TypeVar("_Grid", "AttentionGrid", "GemmGrid")


def _head_counts(value: object) -> tuple[int, int]:
    """Return the counts in ``32/8`` (query/key-value heads), or ``32`` for as many of both."""
    counts = [parse_size(count) for count in str(value).split("/")]
    if len(counts) > 2 or min(counts) < 1:
        raise ValueError("write query/key-value heads, such as 32/8, or 32 for as many of both")
    queries, kv = counts[0], counts[-1]
    if queries % kv:
        raise ValueError(
            f"{queries} query heads cannot share {kv} key-value heads evenly; write N/K with K "
            "dividing N, such as 32/8, or N alone"
        )
    return queries, kv


def _known_backend(name: str) -> str:
    from sppo.bench.attention_backends import BACKENDS

    if name not in BACKENDS:
        raise ValueError(f"not one of {', '.join(BACKENDS)}.{nearest(name, BACKENDS)}")
    return name


_LIST: tuple[Any, ...] = (BeforeValidator(comma_list), Field(min_length=1))
_EACH_ONCE = AfterValidator(lambda values: tuple(dict.fromkeys(values)))
_ASCENDING = AfterValidator(lambda values: tuple(sorted(set(values))))
_Sizes = Annotated[tuple[Annotated[Size, Field(ge=1)], ...], *_LIST, _ASCENDING]
_Heads = Annotated[tuple[int, int], BeforeValidator(_head_counts)]
_Backend = Annotated[str, AfterValidator(_known_backend)]


class BenchKeys(Section):
    """Precisions and shapes to measure, each a list with commas; None takes the default grid's."""

    dtype: Annotated[tuple[ComputeDtype, ...], *_LIST, _EACH_ONCE] = ("bf16", "fp32")
    """Precisions."""
    queries: _Sizes | None = None
    """attention: queries of a span, such as 4Ki,16Ki; there are 1 to 8 times as many keys."""
    keys: _Sizes | None = None
    """attention: keys that the queries are the last of, such as 32Ki,64Ki."""
    heads: Annotated[tuple[_Heads, ...], *_LIST, _EACH_ONCE] | None = None
    """attention: query/key-value heads, such as 32/8,32; plans take the first."""
    head_size: _Sizes | None = None
    """attention: sizes of a head, such as 64,128."""
    backend: Annotated[tuple[_Backend, ...], *_LIST, _EACH_ONCE] | None = None
    """attention: back ends, such as cudnn,torch_flash; all that can if left out."""
    tokens: _Sizes | None = None
    """gemm: rows of the input, such as 2Ki,8Ki."""
    width: _Sizes | None = None
    """gemm: width of the input and the output, such as 4Ki,8Ki."""


_SUBJECT_OF_KEY = {key: "attention" for key in BenchKeys.model_fields if key != "dtype"}
_SUBJECT_OF_KEY |= {"tokens": "gemm", "width": "gemm"}
"""Subject that uses a key; all of them use dtype."""
_COPIES = ("pcie", "overlap")


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


app = CommandGroup()


@app.command("bench", cls=key_command(BenchKeys))
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
    with exit_codes():
        asked = read_keys(BenchKeys, words or ())
        check_output_files({"-o": output}, inputs=[] if run is None else [run])
        from sppo.bench.hardware_description import (
            describe,
            described_machine,
            starting_description,
        )
        from sppo.bench.memory import check_memory
        from sppo.bench.suite import BenchRequest, device_to_measure, measure
        from sppo.cli.bench_tables import bench_json, bench_screen

        device = device_to_measure()
        parts = subject.parts(device)
        _check_used(asked, {"--disk": disk, "--run": run}, subject=subject, parts=parts)
        grids = asked_grids(asked, device=device, quick=quick, for_plans=output is not None)
        copying = None
        if set(parts).intersection(_COPIES):
            copying = _copying(device=device, disk=disk, run_file=run, quick=quick)
        base = starting_description(described_machine(device), path=output)
        check_memory(grids, subjects=parts, device=device, dtypes=asked.dtype)
        with BenchDisplay(Console(stderr=json_output)) as display:
            request = BenchRequest(device, asked.dtype, quick, grids, copying)
            found = measure(parts, request, watcher=display)
        spec = describe(base, found)
        if output is not None:
            write_json(output, hardware_json(spec))
    emit(
        lambda: bench_json(found, spec, output),
        lambda: bench_screen(found, output),
        as_json=json_output,
    )


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


def _check_used(
    asked: BenchKeys, files: dict[str, Path | None], *, subject: Subject, parts: Sequence[str]
) -> None:
    """Raise ValueError if a key, or an option of copies, was given that no measured subject uses.

    Args:
        asked: Keys of the command line.
        files: Options of copies.
        subject: Subject named on the command line.
        parts: Single subjects to measure.
    """
    users: dict[str, tuple[str, ...]] = {
        key: (_SUBJECT_OF_KEY[key],) for key in asked.model_fields_set - {"dtype"}
    }
    users |= {f"{option} {path}": _COPIES for option, path in files.items() if path is not None}
    for given, of in users.items():
        if not set(of).intersection(parts):
            raise ValueError(
                f"{given}: only sppo bench {', '.join(of)} and all use it; leave it out of "
                f"sppo bench {subject.value}"
            )


def _copying(*, device: str, disk: Path | None, run_file: Path | None, quick: bool) -> CopySetup:
    """Return the target of copies and the layer that they overlap with.

    Raises:
        ValueError: The run file is invalid, or the directory does not exist.
        OSError: The disk has too little free space.
    """
    from sppo.bench.disk import check_disk
    from sppo.bench.overlap import MeasuredLayer, default_layer
    from sppo.bench.suite import CopySetup

    layer, default = default_layer(device), "."
    if run_file is not None:
        run = load_run(run_file, ())
        name = run.model.preset or run.model.from_hf or str(run_file)
        layer = MeasuredLayer(name, run.model, run.train.dtype)
        default = run.activations.disk or default
    if device == "cpu" and disk is None:
        disk = Path(default)
    if disk is not None:
        check_disk(disk, quick=quick)
    return CopySetup(disk, layer)


def asked_grids(asked: BenchKeys, *, device: str, quick: bool, for_plans: bool) -> Grids:
    """Return the default grids with the axes replaced that the command line gives.

    Args:
        asked: Keys of the command line.
        device: "cpu" or "cuda".
        quick: Use few shapes on axes that the command line does not give.
        for_plans: Whether the rates go into a hardware description.

    Raises:
        ValueError: Shapes that contradict each other or that plans cannot read, or a back end that
            can run none of the shapes.
    """
    from sppo.bench.attention_grid import Heads
    from sppo.bench.suite import default_grids

    grids = default_grids(device, quick=quick)
    attention = _with_axes(
        grids.attention,
        queries=asked.queries,
        keys=asked.keys,
        heads=asked.heads and tuple(Heads(*counts) for counts in asked.heads),
        head_sizes=asked.head_size,
        backends=asked.backend,
    )
    _check_attention(attention, device=device, dtypes=asked.dtype)
    if for_plans:
        _check_for_plans(attention, device=device, dtypes=asked.dtype)
    gemm = _with_axes(grids.gemm, tokens=asked.tokens, widths=asked.width)
    return replace(grids, gemm=gemm, attention=attention)


def _with_axes(grid: _Grid, **axes: object) -> _Grid:
    """Return `grid` with the axes that are not None; it is fixed if there is one."""
    given: dict[str, Any] = {name: axis for name, axis in axes.items() if axis is not None}
    return replace(grid, **given, fixed=bool(given))


def _check_attention(grid: AttentionGrid, *, device: str, dtypes: Sequence[str]) -> None:
    """Raise ValueError if spans have too few keys, or a back end can run none of the shapes.

    A back end that can run some of the shapes is accepted; the other shapes are gaps in its
    results.
    """
    from sppo.bench.attention_backends import why_never_timed

    if grid.keys is not None and grid.keys[0] < grid.queries[-1]:
        keys, queries = format_tokens(grid.keys[0]), format_tokens(grid.queries[-1])
        raise ValueError(
            f"keys={keys}: fewer than {queries} queries, which are the last of them; ask for keys "
            f"from {queries} on, or for queries up to {keys}"
        )
    for name in grid.backends or ():
        reason = why_never_timed(name, grid, dtypes=dtypes, device=device)
        if reason is not None:
            raise ValueError(
                f"backend={name}: {reason}; ask for others, or leave backend out to time all that "
                "can run here"
            )


def _check_for_plans(grid: AttentionGrid, *, device: str, dtypes: Sequence[str]) -> None:
    """Raise ValueError if plans could not read the measured attention rates.

    Plans read rates by the number of keys per query, of the back end that training would choose.
    """
    from sppo.kernels.attention.choice import chosen_name

    if not grid.for_plans:
        queries = ",".join(map(format_tokens, grid.queries))
        raise ValueError(
            f"-o: a plan reads attention by keys per query, which must be the same for all of "
            f"queries={queries}; leave out keys, ask for one number of queries, or leave out -o"
        )
    if grid.backends is None:
        return
    for spans in grid.problems(dtypes):
        taken = chosen_name("auto", spans[0].case(device))
        if taken not in grid.backends:
            raise ValueError(
                f"-o: a plan reads the rates of {taken}, which training takes for {spans[0].dtype} "
                f"and heads of {spans[0].head_size}; add it to backend, or leave out -o"
            )
