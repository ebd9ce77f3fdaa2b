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
import ctypes
import gc
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from pipeline_ranks import TIMEOUT, provenance, run_ranks, timed_s  # beside this file
from planned_units import planned_seconds, simulated_timeline, unit_seconds

from sppo.cost.packed_sequence import PackedSequence
from sppo.data.samples.length_distributions import DISTRIBUTIONS, draw
from sppo.hardware.this_machine import divide_cpu, this_machine, usable_memory_bytes
from sppo.output_file import write_text
from sppo.planning.corpus.packings import Piece
from sppo.planning.corpus.sides import SideStep, deviation
from sppo.schedule.actions import COMPUTE_KINDS
from sppo.schedule.simulation.measured_compute import (
    ActionSeconds,
    action_seconds,
    median_seconds,
    step_seconds,
)
from sppo.schedule.timeline import Timeline
from sppo.units import MIB

if TYPE_CHECKING:
    from torch import Tensor

    from sppo.engine.engine import StepResult
    from sppo.engine.unit import SequenceData
    from sppo.parallel.pipeline_p2p import PipelineLinks
    from sppo.training.ranks import Ranks

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
    joined = _join(rank, arguments.ranks)
    engines = {
        virtual: _RankEngine(request, joined, virtual_stages=virtual)
        for virtual in dict.fromkeys(_virtual_stages(steps) for steps in sides.values())
    }
    measured = {name: _Measured(steps) for name, steps in sides.items()}
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


@dataclass(frozen=True, slots=True)
class _Joined:
    """Rank that is connected to the other ranks."""

    ranks: Ranks
    links: PipelineLinks


def _join(rank: int, ranks: int) -> _Joined:
    """Connect this rank to the pipeline, which is the default process group."""
    import torch

    from sppo.kernels.native.cpu_allocator import install_cpu_allocator
    from sppo.parallel.host_collectives import HostCollectives
    from sppo.parallel.mesh import Mesh
    from sppo.parallel.mesh_shape import MeshShape
    from sppo.parallel.pipeline_p2p import PipelineLinks
    from sppo.training.ranks import Ranks

    install_cpu_allocator()
    shape = MeshShape(pipeline_parallel=ranks)
    mesh = Mesh(shape, rank=rank, timeout_s=TIMEOUT.total_seconds()).connect(wraps=True)
    together = Ranks(mesh, HostCollectives(mesh), None)  # type: ignore[arg-type]
    return _Joined(together, PipelineLinks(mesh, device=torch.device("cpu")))


class _RankEngine:
    """Engine of one rank, for the steps of all sides with the same number of stages on a rank.

    Args:
        request: Request to compare.
        joined: This rank.
        virtual_stages: Number of stages on every rank.
    """

    def __init__(self, request: Request, joined: _Joined, *, virtual_stages: int) -> None:
        from sppo.config.model import ModelConfig
        from sppo.cost.parameters import stage_shapes
        from sppo.engine.engine import Engine
        from sppo.engine.pipeline import Pipeline
        from sppo.kernels.native.cpu_allocator import install_cpu_allocator
        from sppo.model.gradients import zero_gradients
        from sppo.model.initialize import initial_weights
        from sppo.training.state_tensors import DTYPES

        self._pool = install_cpu_allocator()
        model = ModelConfig.model_validate(request.model)
        self.ranks = joined.ranks
        shape, at = joined.ranks.mesh.shape, joined.ranks.mesh.at
        # Every step has its own program; this schedule makes the programs of the warm-up.
        schedule = "sppo" if virtual_stages == 1 else "looped_bfs"
        pipeline = Pipeline(
            schedule, shape.pipeline_parallel, at.pipeline, virtual_stages, p2p=joined.links
        )
        everything = initial_weights(model, seed=0)
        weights = {
            name: everything[name].to(DTYPES[request.dtype])
            for layers in pipeline.layers(model.num_layers).values()
            for name in stage_shapes(model, layers)
        }
        self._gradients = zero_gradients(weights)
        self.state_bytes = sum(
            tensor.nbytes for tensor in (*weights.values(), *self._gradients.values())
        )
        self._engine = Engine(
            model, weights=weights, gradients=self._gradients, policy="retain", pipeline=pipeline
        )
        self._samples = [
            _tokens_of_samples(lengths, vocab_size=model.vocab_size, seed=step)
            for step, lengths in enumerate(request.lengths)
        ]
        self._running: tuple[SideStep, list[SequenceData]] | None = None
        self.done: StepResult | None = None

    def warm_up(self, step: SideStep) -> None:
        """Run the first subsequence of a step's first sequence, which loads libraries."""
        from sppo.engine.unit import SequenceData

        tokens = step.plan.sequences[0].lengths[0]
        tokens_S = self._samples[0][0].new_zeros(tokens)
        self._engine.accumulate([SequenceData(tokens_S, tokens_S)], [(0, tokens)])

    def begin(self, step: SideStep, index: int) -> None:
        """Make the data of a step and clear the gradients."""
        import torch

        data = [
            _sequence_data(sequence, pieces, self._samples[index])
            for sequence, pieces in zip(step.plan.sequences, step.packing.pieces, strict=True)
        ]
        self._running, self.done = (step, data), None
        torch._foreach_zero_(list(self._gradients.values()))
        gc.collect()
        self.take_saved_bytes()

    def step(self) -> None:
        """Run forward and backward of all sequences."""
        from sppo.engine.step_programs import PlannedStep

        assert self._running is not None, "a step has begun"
        step, data = self._running
        boundaries = [sequence.boundaries for sequence in step.plan.sequences]
        planned = PlannedStep(step.plan.program, step.plan.placements)
        self.done = self._engine.accumulate(data, boundaries, planned=planned)

    def resident_bytes_of_step(self) -> int:
        """Run the step; return the process's peak bytes above what it needs before the step."""
        from sppo.kernels.native.process_memory import (
            peak_resident_bytes,
            reset_peak,
            resident_bytes,
        )

        if self._pool is not None:
            self._pool.trim()
        ctypes.CDLL(None).malloc_trim(0)
        idle_bytes = resident_bytes()
        reset_peak()
        self.step()
        return peak_resident_bytes() - idle_bytes

    def take_saved_bytes(self) -> int:
        """Return the peak bytes of saved activations and K/V since the last call."""
        peaks = self._engine.take_peaks()
        return peaks.activations_bytes + peaks.kv_bytes


@dataclass(slots=True)
class _Measured:
    """Measurements of one side on one rank.

    Attributes:
        steps: Steps of the side.
        seconds: Seconds of each step in each turn.
        idle_shares: Idle share of all ranks in each step and turn; on rank 0 only.
        losses: Mean loss of each step.
        resident_bytes: Peak bytes of the process above its bytes between steps, over all steps.
        saved_bytes: Peak bytes of saved activations, K/V and their gradients over all steps.
        timelines: Timeline of each step in the last turn; on rank 0 only.
        action_s: Measured seconds of the actions of each step in each turn; on rank 0 only.
    """

    steps: Sequence[SideStep]
    seconds: dict[int, list[float]] = field(default_factory=dict)
    idle_shares: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    resident_bytes: int = 0
    saved_bytes: int = 0
    timelines: dict[int, Timeline] = field(default_factory=dict)
    action_s: dict[int, list[ActionSeconds]] = field(default_factory=dict)

    def note(self, step: int, took_s: float, engine: _RankEngine) -> None:
        """Record the step that was just run; every rank must call this method."""
        from sppo.training.executed_step import executed_timeline

        self.seconds.setdefault(step, []).append(took_s)
        self.saved_bytes = max(self.saved_bytes, engine.take_saved_bytes())
        done = engine.done
        assert done is not None, "a step was run"
        total = engine.ranks.peers.total([float(done.total_loss)])[0]
        self.losses[step] = total / done.num_valid
        timeline = executed_timeline(done, engine.ranks)
        if timeline is not None:
            self.idle_shares.append(timeline.bubble_fraction)
            self.timelines[step] = timeline
            self.action_s.setdefault(step, []).append(action_seconds(timeline))

    def _simulated_s(self, step: int, seconds: ActionSeconds) -> float:
        """Return the simulated seconds of a step with given seconds of its actions."""
        costs = self.steps[step].plan.evaluated.costs
        return step_seconds(self.timelines[step], costs=costs, seconds=seconds)

    def note_resident_bytes(self, peak_bytes: int) -> None:
        """Record the peak of a step that was run to measure memory."""
        self.resident_bytes = max(self.resident_bytes, peak_bytes)

    def _parts(self) -> dict[str, Any]:
        """Return what separates measured from simulated steps; on rank 0 only.

        `all_own_compute_s` is the time of each step in each turn, simulated with the compute times
        of that turn, and `median_compute_s` that of each step, with the median of each action over
        the turns. `predicted_compute_s` is that with predicted compute times; unlike the simulated
        `step_s` it has no update. `units` are the seconds of each forward and backward of a step,
        all stages together.
        """
        predicted = [planned_seconds(step.plan) for step in self.steps]
        return {
            "all_own_compute_s": [
                [self._simulated_s(step, seconds) for seconds in turns]
                for step, turns in self.action_s.items()
            ],
            "median_compute_s": [
                self._simulated_s(step, median_seconds(turns))
                for step, turns in self.action_s.items()
            ],
            "predicted_compute_s": [
                self._simulated_s(step, seconds) for step, seconds in enumerate(predicted)
            ],
            "units": [
                unit_seconds(step.plan, predicted[index], measured=self.action_s[index])
                for index, step in enumerate(self.steps)
            ],
        }

    def draw(self, path: Path) -> None:
        """Draw the simulated and the executed timeline of the last step."""
        from sppo.timeline.png import write_png

        simulated = simulated_timeline(self.steps[-1].plan)
        write_png(path, timelines=[simulated, self.timelines[len(self.steps) - 1]])

    def figures(self, engine: _RankEngine, *, lengths: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the figures of the side, complete on rank 0; every rank must call this method."""
        gather = engine.ranks.peers.all_gather
        resident = gather(self.resident_bytes + engine.state_bytes)
        peaks = gather(self.saved_bytes + engine.state_bytes)
        step_s = [statistics.median(self.seconds[step]) for step in range(len(self.steps))]
        plans = [step.plan for step in self.steps]
        found: dict[str, Any] = {
            "step_s": step_s,
            "all_step_s": list(self.seconds.values()),
            "tokens_per_s": sum(map(sum, lengths)) / sum(step_s),
            "losses": list(self.losses.values()),
            "resident_bytes": list(resident),
            "peak_bytes": list(peaks),
            "predicted_peak_bytes": _predicted_bytes(self.steps),
            "length_deviation": statistics.median(
                deviation(plan.evaluated.candidate.lengths) for plan in plans
            ),
        }
        if engine.ranks.is_main:
            found["idle_share"] = statistics.median(self.idle_shares)
            found["time_deviation"] = statistics.median(
                deviation(_unit_seconds(timeline)) for timeline in self.timelines.values()
            )
            found |= self._parts()
        return found


_COUNTED = (
    "weights_bytes",
    "gradients_bytes",
    "kv_bytes",
    "kv_gradients_bytes",
    "activations_bytes",
    "loss_gradient_bytes",
)
"""Buckets that an engine counts: all tensors but the working set. There is no optimizer here."""


def _predicted_bytes(steps: Sequence[SideStep]) -> list[int]:
    """Return the predicted peak of each rank over all steps, of buckets that an engine counts."""
    of_steps = [
        [
            sum(getattr(rank.device, name) for name in _COUNTED)
            for rank in step.plan.evaluated.memory
        ]
        for step in steps
    ]
    return [max(of_rank) for of_rank in zip(*of_steps, strict=True)]


def _unit_seconds(timeline: Timeline) -> list[float]:
    """Return the compute seconds of each unit, summed over all ranks."""
    seconds: dict[tuple[int, int], float] = {}
    for track in timeline.ranks:
        for action, start, finish in zip(track.actions, track.start_s, track.finish_s, strict=True):
            if action.kind in COMPUTE_KINDS:
                seconds[action.unit] = seconds.get(action.unit, 0.0) + float(finish - start)
    return list(seconds.values())


def _tokens_of_samples(lengths: Sequence[int], *, vocab_size: int, seed: int) -> list[Tensor]:
    """Return random token ids of each sample, one more than its tokens: the last is a label."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (tokens + 1,), generator=generator) for tokens in lengths]


def _sequence_data(
    sequence: PackedSequence, pieces: Sequence[Piece], samples: Sequence[Tensor]
) -> SequenceData:
    """Return the data of a sequence of pieces of samples, padded to its tokens."""
    import torch

    from sppo.engine.unit import SequenceData
    from sppo.kernels.labels import IGNORED_LABEL

    padding = sequence.tokens - sum(piece.tokens for piece in pieces)
    nothing = samples[0].new_zeros(padding)
    return SequenceData(
        torch.cat([*(samples[sample][begin:end] for sample, begin, end in pieces), nothing]),
        torch.cat(
            [
                *(samples[sample][begin + 1 : end + 1] for sample, begin, end in pieces),
                nothing + IGNORED_LABEL,
            ]
        ),
        tuple(accumulate(sequence.samples[:-1], initial=0)),
    )


if __name__ == "__main__":
    main()
