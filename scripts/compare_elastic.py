"""Compare ways to pack samples of unequal length in pipeline training.

Samples are drawn from a published distribution of document lengths. *padded*: each sample alone,
padded to the longest sample of its step. *stream*: rows of a fixed length cut from one stream, with
isolated documents. *fixed*: Seq1F1B with chunks of a fixed number of tokens. *elastic*: packed and
cut by the step planner, with the same schedule. *elastic_auto*: schedule and stages on a rank are
planned as well. *recompute_all*, *recompute_uniform*, *checkpointing* and *levels* get less memory
than is needed to retain everything, and recompute (``level_sides.py``). All sides train the same
samples with the same engine and weights, on pipeline ranks that are processes with one thread each,
over gloo. The sides take turns, every other turn in reverse, so that noise of the machine affects
all of them; a side is compared with the baseline of the same turn. Memory is measured in a turn of
its own, in which processes return free memory before each step. The same steps are simulated, also
for more ranks than are measured.

    OMP_NUM_THREADS=1 sppo bench all --output hardware.json
    python scripts/compare_elastic.py --hardware hardware.json --output elastic.json --plots .
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_engine import RankEngine, join  # beside this file
from elastic_measurements import SideMeasurements  # beside this file
from elastic_sides import (  # beside this file
    BASELINE,
    BASELINES,
    PACKED_SIDES,
    SIDES,
    Request,
    figures,
    side_steps,
)
from kernel_seconds import with_kernel_seconds  # beside this file
from option_types import one_of, output_file, positive, several
from pipeline_ranks import provenance, run_ranks, timed_s  # beside this file

from sppo.data.samples.length_distributions import DISTRIBUTIONS, draw
from sppo.hardware.this_machine import divide_cpu, this_machine, usable_memory_bytes
from sppo.output_file import write_text
from sppo.planning.corpus.sides import SideStep
from sppo.units import MIB

MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_layers": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "mlp_size": 512,
}
"""Two layers for each of eight stages. The model is narrow, so that attention matters at lengths
that fit into memory."""
USABLE_FRACTION = 0.8


def main() -> None:
    """Start the ranks, measure the sides in turns, report."""
    arguments = _arguments()
    load_before = os.getloadavg()
    request = _request(arguments)
    counts = dict.fromkeys([arguments.ranks, *arguments.simulated_ranks])
    simulated = {
        ranks: {
            side: figures(steps, lengths=request.lengths)
            for side, steps in side_steps(request, ranks=ranks, sides=arguments.sides).items()
        }
        for ranks in counts
    }
    measured = run_ranks(_serve, (arguments, request), ranks=arguments.ranks)
    report = {
        **provenance(),
        "load_before": load_before,
        "model": MODEL,
        "dtype": arguments.dtype,
        "rates": request.hardware.provenance,
        "kernel_s": request.hardware.device.kernel_s,
        "distribution": arguments.distribution,
        "source": DISTRIBUTIONS[arguments.distribution].source,
        "scale": arguments.scale,
        "longest": arguments.longest,
        "samples": [len(lengths) for lengths in request.lengths],
        "tokens": [sum(lengths) for lengths in request.lengths],
        "longest_samples": [max(lengths) for lengths in request.lengths],
        "turns": arguments.turns,
        "memory_share": request.memory_share,
        "simulated": {ranks: _over_baseline(sides) for ranks, sides in simulated.items()},
        "ranks": arguments.ranks,
        **measured,
        "measured": _over_baseline_by_turn(measured["measured"]),
    }
    _print(report)
    if arguments.output is not None:
        write_text(arguments.output, json.dumps(report, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--distribution", type=one_of(*DISTRIBUTIONS), default="magi")
    parser.add_argument("--samples", type=positive, default=192, help="of a step")
    parser.add_argument("--scale", type=float, default=1 / 8, help="factor of all lengths")
    parser.add_argument("--longest", type=positive, default=24576, help="longer samples are cut")
    parser.add_argument("--seed", type=int, default=0, help="of the first step's lengths")
    parser.add_argument("--steps", type=positive, default=3, help="each of other samples")
    parser.add_argument("--turns", type=positive, default=3, help="measurements of each step")
    parser.add_argument("--sides", type=several(one_of(*SIDES)), default=list(PACKED_SIDES[1:]))
    parser.add_argument(
        "--chunk-tokens",
        type=positive,
        help="of a subsequence where that is fixed; default: what is simulated to be fastest",
    )
    parser.add_argument(
        "--row-tokens", type=positive, help="of a row of the stream; default: --longest"
    )
    parser.add_argument(
        "--memory-share",
        type=float,
        default=0.5,
        help="memory of sides that recompute: 0 just lets them recompute, 1 retain everything",
    )
    parser.add_argument("--ranks", type=positive, default=2, help="that measure")
    parser.add_argument(
        "--simulated-ranks", type=several(positive), default=[4, 8], help="only simulated"
    )
    parser.add_argument(
        "--dtype",
        type=one_of("bf16", "fp32"),
        default="fp32",
        help="in bf16 a CPU compiles code for every number of tokens that it has not met before",
    )
    parser.add_argument("--hardware", type=Path, help="rates of sppo bench, for one thread")
    parser.add_argument("--output", type=output_file, help="write the figures here as JSON")
    parser.add_argument("--plots", type=Path, help="draw a timeline of each side in this folder")
    arguments = parser.parse_args()
    if arguments.ranks < 2:
        parser.error(
            f"--ranks {arguments.ranks}: one rank has no pipeline to fill; write 2 or more"
        )
    if arguments.plots is not None and not arguments.plots.is_dir():
        parser.error(f"--plots {arguments.plots}: is no folder; make it first")
    return arguments


def _request(arguments: argparse.Namespace) -> Request:
    """Return the request, which is the same on all ranks."""
    one_thread = divide_cpu(this_machine(arguments.hardware), 1, threads=1)
    lengths = [
        draw(
            arguments.distribution,
            arguments.samples,
            seed=arguments.seed + step,
            longest=arguments.longest,
            scale=arguments.scale,
        )
        for step in range(arguments.steps)
    ]
    return Request(
        MODEL,
        arguments.dtype,
        with_kernel_seconds(one_thread, model=MODEL, dtype=arguments.dtype),
        int(USABLE_FRACTION * usable_memory_bytes() / arguments.ranks),
        tuple(lengths),
        arguments.longest,
        arguments.row_tokens or arguments.longest,
        arguments.chunk_tokens,
        arguments.memory_share,
    )


def _over_baseline(sides: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each side with its tokens per second relative to the baseline."""
    baseline = _baseline(sides)
    base = sides[baseline]["tokens_per_s"] if baseline in sides else None
    return {
        name: {**side, f"over_{baseline}": side["tokens_per_s"] / base if base else None}
        for name, side in sides.items()
    }


def _over_baseline_by_turn(sides: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each side with the median of its speed relative to the baseline's.

    A turn's speed is relative to the baseline's in the same turn.
    """
    turns = {
        name: list(map(sum, zip(*side["all_step_s"], strict=True))) for name, side in sides.items()
    }
    base = turns.get(_baseline(sides))
    return {
        name: {
            **side,
            f"over_{_baseline(sides)}": statistics.median(
                other / own for own, other in zip(turns[name], base, strict=True)
            )
            if base
            else None,
        }
        for name, side in sides.items()
    }


def _baseline(sides: Iterable[str]) -> str:
    """Return the baseline among `sides`; the default baseline if there is none."""
    own = set(sides)
    return next((name for name in BASELINES if name in own), BASELINE)


def _print(report: Mapping[str, Any]) -> None:
    baseline = _baseline(report["measured"])
    compared = f"of {baseline}"
    header = f"{'':<24}{'tokens/s':>9} {compared:>16} {'idle':>6} {'deviation of time':>18}, length"
    print(header)
    rows = {
        **{f"simulated, {ranks} ranks": sides for ranks, sides in report["simulated"].items()},
        f"measured, {report['ranks']} ranks": report["measured"],
    }
    for label, sides in rows.items():
        print(label)
        for name, side in sides.items():
            over = side[f"over_{baseline}"]
            print(
                f"  {name:<22}{side['tokens_per_s']:>9.0f} "
                f"{'' if over is None else f'{over:.3f}x':>16} {side['idle_share']:>6.1%} "
                f"{side['time_deviation']:>18.1%}, {side['length_deviation']:.1%}"
            )
    _print_parts(report)
    for name, side in report["measured"].items():
        print(
            f"peak of {name}: {max(side['peak_bytes']) / MIB:.0f} MiB, predicted "
            f"{max(side['predicted_peak_bytes']) / MIB:.0f}"
        )
    print(f"losses agree to {report['loss_difference']:.1e}; load before {report['load_before']}")


def _print_parts(report: Mapping[str, Any]) -> None:
    """Print what separates the measured step from the simulated one, as sums over the steps."""
    print("seconds of all steps, simulated with compute times that are ...")
    print(f"{'':<24}{'predicted':>10} {'medians':>9} {'of the turn':>12} {'measured':>9}")
    for name, side in report["measured"].items():
        own = sum(map(statistics.median, side["all_own_compute_s"]))
        print(
            f"  {name:<22}{sum(side['predicted_compute_s']):>10.2f} "
            f"{sum(side['median_compute_s']):>9.2f} {own:>12.2f} {sum(side['step_s']):>9.2f}"
        )


def _serve(rank: int, given: tuple[argparse.Namespace, Request]) -> dict[str, Any] | None:
    """Run one rank; return the figures on rank 0."""
    arguments, request = given
    sides = side_steps(request, ranks=arguments.ranks, sides=arguments.sides)
    joined = join(rank, arguments.ranks)
    engines = {
        virtual: RankEngine(request, joined, virtual_stages=virtual)
        for virtual in dict.fromkeys(_virtual_stages(steps) for steps in sides.values())
    }
    measured = {name: SideMeasurements(steps) for name, steps in sides.items()}
    for steps in sides.values():
        engines[_virtual_stages(steps)].warm_up(steps[0])
    for turn in range(arguments.turns):
        for step in range(arguments.steps):
            for name, steps in list(sides.items())[:: -1 if turn % 2 else 1]:
                engine = engines[_virtual_stages(steps)]
                engine.begin(steps[step], step)
                took_s = timed_s(engine.step)
                measured[name].note(step, took_s, engine)
                if rank == 0:
                    print(f"  turn {turn} step {step} {name:<12} {took_s:8.2f} s", flush=True)
    for step in range(arguments.steps):
        for name, steps in sides.items():
            engine = engines[_virtual_stages(steps)]
            engine.begin(steps[step], step)
            measured[name].note_resident_bytes(engine.resident_bytes_of_step())
    if arguments.plots is not None and rank == 0:
        for name, side in measured.items():
            side.draw(arguments.plots / f"elastic_{name}.png")
    of_sides = {
        name: side.figures(engines[_virtual_stages(side.steps)], lengths=request.lengths)
        for name, side in measured.items()
    }
    if rank:
        return None
    alike = [side["losses"] for name, side in of_sides.items() if name != "stream"]
    difference = max(
        (abs(loss / alike[0][step] - 1) for losses in alike for step, loss in enumerate(losses)),
        default=0.0,
    )
    return {"measured": of_sides, "loss_difference": difference}


def _virtual_stages(steps: Sequence[SideStep]) -> int:
    """Return the number of stages on each rank for a side."""
    return steps[0].plan.evaluated.candidate.virtual_stages


if __name__ == "__main__":
    main()
