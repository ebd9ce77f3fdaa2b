"""Compare ways to pack samples of unequal length in pipeline training.

Samples are drawn from a published distribution of document lengths. *padded*: each sample alone,
padded to the longest sample of its step. *stream*: rows of a fixed length cut from one stream, with
isolated documents. *fixed*: Seq1F1B with chunks of a fixed number of tokens. *elastic*: packed and
cut by the step planner, with the same schedule. *elastic_auto*: schedule and stages on a rank are
planned as well.

All sides train the same samples with the same engine and weights, on pipeline ranks that are
processes with one thread each. The sides take turns, every other turn in reverse; a side is
compared with the baseline of the same turn. The same steps are simulated, also for more ranks than
are measured.

    OMP_NUM_THREADS=1 sppo bench all --output hardware.json
    python -m experiments.packings --hardware hardware.json --output elastic.json --plots .
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import harness
from experiments.packing_sides import (
    BASELINE,
    SIDES,
    Request,
    SideStep,
    figures,
    side_steps,
)
from experiments.planned_rank import PlannedRank
from sppo.data.samples.length_distributions import DISTRIBUTIONS, draw
from sppo.engine.step_programs import PlannedStep
from sppo.engine.unit import SequenceData
from sppo.hardware.file import read_hardware
from sppo.hardware.this_machine import detect_machine, divide_cpu, usable_memory_bytes
from sppo.kernels.labels import IGNORED_LABEL
from sppo.plots.timeline import write_png
from sppo.schedule.simulation.simulate import simulate
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
_COUNTED = (
    "weights_bytes",
    "gradients_bytes",
    "kv_bytes",
    "kv_gradients_bytes",
    "activations_bytes",
    "loss_gradient_bytes",
)
"""Buckets that an engine counts: all tensors but the working set, without an optimizer."""


def main() -> None:
    """Start the ranks, measure the sides in turns, report."""
    options = _options()
    request = request_of(options)
    simulated = {
        ranks: {
            side: figures([step.plan for step in steps], request.lengths)
            for side, steps in side_steps(request, ranks=ranks, sides=options.sides).items()
        }
        for ranks in dict.fromkeys([options.ranks, *options.simulated_ranks])
    }
    found = harness.run_ranks(_serve, (options, request), ranks=options.ranks)
    report = {
        "model": MODEL,
        "dtype": options.dtype,
        "rates": request.hardware.provenance,
        "distribution": options.distribution,
        "samples": options.samples,
        "longest": options.longest,
        "tokens": [sum(lengths) for lengths in request.lengths],
        "ranks": options.ranks,
        "simulated": simulated,
        **found,
    }
    for ranks, sides in simulated.items():
        _print(f"simulated, {ranks} ranks", sides)
    _print(f"measured, {options.ranks} ranks", found["measured"])
    for name, side in found["measured"].items():
        peak, predicted = (max(side[key]) / MIB for key in ("peak_bytes", "predicted_peak_bytes"))
        print(f"peak of {name}: {peak:.0f} MiB, predicted {predicted:.0f}")
    print(f"losses agree to {found['loss_difference']:.1e}")
    harness.write_report(options.output, {**harness.header(), **report})


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    add, positive = parser.add_argument, harness.positive
    add("--distribution", type=harness.one_of(*DISTRIBUTIONS), default="magi")
    add("--samples", type=positive, default=192, help="of a step")
    add("--scale", type=float, default=1 / 8, help="factor of all lengths")
    add("--longest", type=positive, default=24576, help="longer samples are cut")
    add("--seed", type=int, default=0, help="of the first step's lengths")
    add("--steps", type=positive, default=3, help="each of other samples")
    add("--turns", type=positive, default=3, help="measurements of each step")
    sides = harness.several(harness.one_of(*SIDES))
    add("--sides", type=sides, default=["stream", "fixed", "elastic", "elastic_auto"])
    add("--chunk-tokens", type=positive, help="of a fixed subsequence; default: the fastest")
    add("--row-tokens", type=positive, help="of a row of the stream; default: --longest")
    add("--ranks", type=positive, default=2, help="that measure")
    add("--simulated-ranks", type=harness.several(positive), default=[4, 8])
    # In bf16 a CPU compiles code for every number of tokens that it has not met before.
    add("--dtype", type=harness.one_of("bf16", "fp32"), default="fp32")
    add("--hardware", type=Path, help="rates of sppo bench, for one thread")
    add("--plots", type=Path, help="draw a timeline of each side in this folder")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: one rank has no pipeline to fill; write 2 or more")
    if options.plots is not None and not options.plots.is_dir():
        parser.error(f"--plots {options.plots}: is no folder; make it first")
    return options


def request_of(options: argparse.Namespace) -> Request:
    """Return the request, which is the same on all ranks."""
    lengths = [
        draw(
            options.distribution,
            options.samples,
            seed=options.seed + step,
            longest=options.longest,
            scale=options.scale,
        )
        for step in range(options.steps)
    ]
    machine = read_hardware(options.hardware) if options.hardware else detect_machine()
    return Request(
        MODEL,
        options.dtype,
        divide_cpu(machine, 1, threads=1),
        int(USABLE_FRACTION * usable_memory_bytes() / options.ranks),
        tuple(lengths),
        options.longest,
        options.row_tokens or options.longest,
        options.chunk_tokens,
    )


def _serve(rank: int, given: tuple[argparse.Namespace, Request]) -> dict[str, Any]:
    """Run one rank; return the figures, complete on rank 0."""
    options, request = given
    sides = side_steps(request, ranks=options.ranks, sides=options.sides)
    engines: dict[int, PlannedRank] = {}
    for steps in sides.values():
        virtual = steps[0].plan.evaluated.candidate.virtual_stages
        if virtual not in engines:
            engines[virtual] = _engine(options, virtual, rank=rank)
    measured = {
        name: _Side(steps, engines[steps[0].plan.evaluated.candidate.virtual_stages])
        for name, steps in sides.items()
    }
    samples = [_samples(lengths, seed=step) for step, lengths in enumerate(request.lengths)]
    for turn in range(-1, options.turns):  # the first one warms up
        for step in range(options.steps):
            for name, side in [*measured.items()][:: -1 if turn % 2 else 1]:
                took_s = side.run(step, samples[step], counts=turn >= 0)
                if rank == 0:
                    print(f"  turn {turn} step {step} {name:<12} {took_s:8.2f} s", flush=True)
    if options.plots is not None and rank == 0:
        for name, side in measured.items():
            side.draw(options.plots / f"elastic_{name}.png")
    found = {name: side.figures(request.lengths) for name, side in measured.items()}
    alike = [side["losses"] for name, side in found.items() if name != "stream"]
    difference = max(
        (abs(a / b - 1) for losses in alike for a, b in zip(losses, alike[0], strict=True)),
        default=0.0,
    )
    return {"measured": found, "loss_difference": difference}


def _engine(options: argparse.Namespace, virtual: int, *, rank: int) -> PlannedRank:
    """Return the engine of a rank with `virtual` stages; every step has a program of its own."""
    keys = {
        "model": MODEL,
        "sequence": {"length": options.longest},
        "parallel": {
            "pipeline_parallel_degree": options.ranks,
            "virtual_stages": virtual,
            "schedule": "sppo" if virtual == 1 else "looped_bfs",
            "multiplexed": "off",
        },
        "activations": {"policy": "retain"},
        "train": {"dtype": options.dtype},
    }
    return PlannedRank(keys, rank=rank)


class _Side:
    """Measurements of one side on one rank."""

    def __init__(self, steps: Sequence[SideStep], rank: PlannedRank) -> None:
        self._steps, self._rank = steps, rank
        self._seconds: list[list[float]] = [[] for _ in steps]
        self._idle_shares: list[float] = []
        self._losses = [0.0 for _ in steps]
        self._saved_bytes = 0
        self._timeline: Any = None

    def run(self, step: int, samples: Sequence[Tensor], *, counts: bool) -> float:
        """Run a step, record it if it counts, and return its seconds; a call on every rank."""
        plan, packing = self._steps[step].plan, self._steps[step].packing
        data = [
            _sequence_data(sequence.tokens, sequence.samples, pieces, samples)
            for sequence, pieces in zip(plan.sequences, packing.pieces, strict=True)
        ]
        cuts = [sequence.boundaries for sequence in plan.sequences]
        planned = PlannedStep(plan.program, plan.placements)
        self._rank.state.engine.take_peaks()
        took_s = harness.timed_s(lambda: self._rank.run(data, cuts, planned))
        if counts:
            peaks = self._rank.state.engine.take_peaks()
            self._saved_bytes = max(self._saved_bytes, peaks.activations_bytes + peaks.kv_bytes)
            self._seconds[step].append(took_s)
            self._losses[step] = self._rank.loss()
            self._timeline = self._rank.timeline()
            if self._timeline is not None:
                self._idle_shares.append(self._timeline.bubble_fraction)
        return took_s

    def draw(self, path: Path) -> None:
        """Draw the simulated and the executed timeline of the last step."""
        plan = self._steps[-1].plan
        simulated = simulate(plan.program, costs=plan.evaluated.costs)
        write_png(path, timelines=[simulated, self._timeline])

    def figures(self, lengths: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the figures of the side; every rank must call this method."""
        state = self._rank.state
        held = sum(t.nbytes for t in (*state.weights.values(), *state.gradients.values()))
        step_s = [*map(statistics.median, self._seconds)]
        return {
            "step_s": step_s,
            "all_step_s": self._seconds,
            "tokens_per_s": sum(map(sum, lengths)) / sum(step_s),
            "idle_share": statistics.median(self._idle_shares) if self._idle_shares else None,
            "losses": self._losses,
            "peak_bytes": [*self._rank.job.peers.all_gather(self._saved_bytes + held)],
            "predicted_peak_bytes": _predicted_bytes(self._steps),
        }


def _predicted_bytes(steps: Sequence[SideStep]) -> list[int]:
    """Return the predicted peak of each rank over all steps, of buckets that an engine counts."""
    of_steps = [
        [sum(getattr(one.device, name) for name in _COUNTED) for one in step.plan.evaluated.memory]
        for step in steps
    ]
    return [max(of_rank) for of_rank in zip(*of_steps, strict=True)]


def _samples(lengths: Sequence[int], *, seed: int) -> list[Tensor]:
    """Return random token ids of each sample, one more than its tokens: the last is a label."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = MODEL["vocab_size"]
    return [torch.randint(vocab_size, (tokens + 1,), generator=generator) for tokens in lengths]


def _sequence_data(
    tokens: int, documents: Sequence[int], pieces: Sequence[Any], samples: Sequence[Tensor]
) -> SequenceData:
    """Return the data of a sequence of pieces of samples, padded to its tokens."""
    nothing = samples[0].new_zeros(tokens - sum(piece.tokens for piece in pieces))
    inputs = [samples[sample][begin:end] for sample, begin, end in pieces]
    labels = [samples[sample][begin + 1 : end + 1] for sample, begin, end in pieces]
    return SequenceData(
        torch.cat([*inputs, nothing]),
        torch.cat([*labels, nothing + IGNORED_LABEL]),
        tuple(accumulate(documents[:-1], initial=0)),
    )


def _print(title: str, sides: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a row for each side, beside the baseline among them."""
    rows = []
    for name, side in sides.items():
        over = f"{_speedup(side, sides[BASELINE]):.3f}x" if BASELINE in sides else ""
        rows.append((name, f"{side['tokens_per_s']:.0f}", over, f"{side['idle_share']:.1%}"))
    harness.print_table((title, "tokens/s", f"of {BASELINE}", "idle"), rows)


def _speedup(side: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return how many times as fast a side is: the median over turns, if there are any."""
    if "all_step_s" not in side:
        return float(side["tokens_per_s"] / other["tokens_per_s"])
    turns = [map(sum, zip(*one["all_step_s"], strict=True)) for one in (side, other)]
    return float(statistics.median(theirs / own for own, theirs in zip(*turns, strict=True)))


if __name__ == "__main__":
    main()
