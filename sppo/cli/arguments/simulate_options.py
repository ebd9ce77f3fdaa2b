"""Options of ``sppo simulate``, with their help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sppo.cli.arguments.numbers import amount, count

_MOST = 1_000_000

_WHAT = "What to simulate"
_COST = "Abstract costs"
_OFFLOAD = "Abstract offload"
_OUTPUT = "Output"

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN.yaml] [SECTION.KEY=VALUE]... [NAME]...",
        help="A run file and values that replace its own; more schedule names to compare with.",
        show_default=False,
    ),
]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="gpipe, 1f1b, interleaved_1f1b, seq1f1b, interleaved_seq1f1b, looped_bfs, zb_h1, "
        "seq_zb_h1, sppo or sppo_msp, with abstract costs; with RUN.yaml, instead of the run's.",
        rich_help_panel=_WHAT,
    ),
]
Program = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A program written by hand, one line per rank: 'rank 0: 0F0.0 0B0.0'.",
        rich_help_panel=_WHAT,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        parser=count("--ranks", most=_MOST),
        metavar="P",
        help="Pipeline ranks.",
        rich_help_panel=_WHAT,
    ),
]
Virtual = Annotated[
    int | None,
    typer.Option(
        parser=count("--virtual", most=_MOST),
        metavar="V",
        help="Stages per rank [default: 1].",
        rich_help_panel=_WHAT,
    ),
]
Sequences = Annotated[
    int | None,
    typer.Option(
        parser=count("--sequences", most=_MOST),
        metavar="M",
        help="Sequences per step.",
        rich_help_panel=_WHAT,
    ),
]
Subsequences = Annotated[
    int | None,
    typer.Option(
        parser=count("--subsequences", most=_MOST),
        metavar="N",
        help="Subsequences per sequence.",
        rich_help_panel=_WHAT,
    ),
]
Hop = Annotated[
    int | None,
    typer.Option(
        parser=count("--hop", most=2),
        help="Warm-up forwards per rank; 2 hides message latency [default: 1].",
        rich_help_panel=_WHAT,
    ),
]
ForwardOnly = Annotated[
    bool,
    typer.Option("--forward-only", help="Simulate an evaluation.", rich_help_panel=_WHAT),
]
Compare = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME...",
        help="The same work under other schedules, drawn below the first.",
        rich_help_panel=_WHAT,
    ),
]
Forward = Annotated[
    float | None,
    typer.Option(
        parser=amount("--forward"),
        help="Time of one F on one stage [default: 1].",
        rich_help_panel=_COST,
    ),
]
Backward = Annotated[
    float | None,
    typer.Option(
        parser=amount("--backward"),
        help="Time of one B, without W [default: 2].",
        rich_help_panel=_COST,
    ),
]
Weight = Annotated[
    float | None,
    typer.Option(
        parser=amount("--weight"),
        help="Time of one W; part of B in schedules without W [default: 0].",
        rich_help_panel=_COST,
    ),
]
UnitCosts = Annotated[
    str | None,
    typer.Option(
        metavar="C1,C2,...",
        help="A factor on all three for each subsequence.",
        rich_help_panel=_COST,
    ),
]
UnitSizes = Annotated[
    str | None,
    typer.Option(
        metavar="A1,A2,...",
        help="What each subsequence leaves on the device, in units of memory [default: 1].",
        rich_help_panel=_COST,
    ),
]
Latency = Annotated[
    float | None,
    typer.Option(
        parser=amount("--latency"), help="Latency of a message [default: 0].", rich_help_panel=_COST
    ),
]
Bandwidth = Annotated[
    float | None,
    typer.Option(
        parser=amount("--bandwidth", above_zero=True),
        help="Memory units per time over a link [default: unlimited].",
        rich_help_panel=_COST,
    ),
]
MessageSize = Annotated[
    float | None,
    typer.Option(
        parser=amount("--message-size"),
        help="Memory units of a message [default: 0].",
        rich_help_panel=_COST,
    ),
]
WeightSize = Annotated[
    float | None,
    typer.Option(
        parser=amount("--weight-size"),
        help="Memory units of a stage's weights, which MSP sends; its gradients count twice "
        "that [default: 0].",
        rich_help_panel=_COST,
    ),
]
KvSize = Annotated[
    float | None,
    typer.Option(
        parser=amount("--kv-size"),
        help="Memory units of a unit's K/V; dK/dV count twice that [default: 0].",
        rich_help_panel=_COST,
    ),
]
OffloadRatio = Annotated[
    str | None,
    typer.Option(
        metavar="none|full|adaptive|R1,R2,...",
        help="Fraction of each subsequence that leaves the device; adaptive sends what one forward "
        "hides [default: none].",
        rich_help_panel=_OFFLOAD,
    ),
]
D2H = Annotated[
    float | None,
    typer.Option(
        "--d2h",
        parser=amount("--d2h"),
        help="Time to copy one unit of memory to the host [default: 1].",
        rich_help_panel=_OFFLOAD,
    ),
]
H2D = Annotated[
    float | None,
    typer.Option(
        "--h2d",
        parser=amount("--h2d"),
        help="Time to copy one unit of memory back [default: 1].",
        rich_help_panel=_OFFLOAD,
    ),
]
KeepLast = Annotated[
    int | None,
    typer.Option(
        parser=count("--keep-last", least=0, most=_MOST),
        help="Last subsequences that stay [default: 1 with adaptive, else 0].",
        rich_help_panel=_OFFLOAD,
    ),
]
Prefetch = Annotated[
    int | None,
    typer.Option(
        parser=count("--prefetch", most=_MOST),
        help="Backwards ahead at which a unit comes back [default: 1].",
        rich_help_panel=_OFFLOAD,
    ),
]
Png = Annotated[
    Path | None, typer.Option("--png", metavar="FILE", help="A plot.", rich_help_panel=_OUTPUT)
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="A Chrome trace to zoom into, for Perfetto (ui.perfetto.dev) or chrome://tracing.",
        rich_help_panel=_OUTPUT,
    ),
]
WriteProgram = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="The program as text, to edit by hand.", rich_help_panel=_OUTPUT
    ),
]
