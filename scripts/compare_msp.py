"""Compare the same step with and without multiplexed sequence partitioning (MSP).

Pipeline ranks are processes with one thread each, over gloo. Every rank has two engines on the same
weights: one runs the plain program, the other cuts the units next to the bubbles into shards, which
all ranks of an MSP group compute together. Steps alternate, so that noise of the machine affects
both. Run by ``scripts/compare_msp.sh``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from itertools import pairwise
from typing import Any

from option_types import output_file, plot_file
from pipeline_ranks import TIMEOUT, provenance, run_ranks, timed_s  # beside this file

from sppo.output_file import write_text

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 2,
    "mlp_size": 1792,
}
SIDES = ("off", "on")


def main() -> None:
    """Start the ranks, measure both sides in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=16384, help="tokens of a sequence")
    parser.add_argument("--subsequences", "--pieces", type=int, default=4, help="of a sequence (N)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each side")
    parser.add_argument("--output", type=output_file, help="write the figures here as JSON")
    parser.add_argument(
        "--plot", "--picture", type=plot_file, help="draw both executed steps here as PNG"
    )
    arguments = parser.parse_args()
    report = run_ranks(_serve, arguments, ranks=arguments.ranks) | provenance()
    print(
        f"{report['ranks']} ranks, {report['sequences']} x {report['length']} tokens in "
        f"{report['subsequences']} subsequences; step {report['step_s']['off']:.2f} s without, "
        f"{report['step_s']['on']:.2f} s with MSP: {report['on_over_off']:.3f}x; simulated with "
        f"equal units and free messages {report['ideal']:.3f}x; losses agree to "
        f"{report['loss_difference']:.1e}"
    )
    if arguments.output is not None:
        write_text(arguments.output, json.dumps(report, indent=1) + "\n")


def _serve(rank: int, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Run one rank; return the figures on rank 0."""
    side = _Sides(rank, arguments)
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for turn in range(arguments.steps + 1):
        for name in SIDES:
            took_s = timed_s(partial(side.step, name))
            if turn:  # the first one warms up
                seconds[name].append(took_s)
            if rank == 0:
                print(f"  turn {turn} {name:4s} {took_s:8.2f} s", flush=True)
    return side.report(seconds)


class _Sides:
    """Engines of one rank, without and with MSP."""

    def __init__(self, rank: int, arguments: argparse.Namespace) -> None:
        import torch

        from sppo.config.model import ModelConfig
        from sppo.cost.flops import partition_costs
        from sppo.cost.parameters import stage_shapes
        from sppo.engine.engine import Engine
        from sppo.engine.pipeline import Pipeline
        from sppo.kernels.native.cpu_allocator import install_cpu_allocator
        from sppo.model.gradients import zero_gradients
        from sppo.model.initialize import initial_weights
        from sppo.parallel.mesh import Mesh
        from sppo.parallel.mesh_shape import MeshShape
        from sppo.parallel.msp_exchange import MspLinks
        from sppo.parallel.pipeline_p2p import PipelineLinks
        from sppo.planning.partition import boundaries_by_flops

        install_cpu_allocator()
        self._arguments = arguments
        model = ModelConfig.model_validate(MODEL)
        linear, quadratic = partition_costs(model)
        self._cuts = boundaries_by_flops(
            arguments.length,
            num_subsequences=arguments.subsequences,
            linear=linear,
            quadratic=quadratic,
            alignment=64,
        )
        self._mesh = Mesh(
            MeshShape(pipeline_parallel=arguments.ranks),
            rank=rank,
            timeout_s=TIMEOUT.total_seconds(),
        ).connect(cuts_units=True)
        links = PipelineLinks(self._mesh, device=torch.device("cpu"))
        msp_links = MspLinks(self._mesh, device=torch.device("cpu"))
        schedules = {"off": "sppo", "on": "sppo_msp"}
        pipelines = {
            name: Pipeline(
                schedule,
                arguments.ranks,
                rank,
                p2p=links,
                msp_links=msp_links if name == "on" else None,
                planned=self._msp_program(model) if name == "on" else None,
            )
            for name, schedule in schedules.items()
        }
        names = stage_shapes(model, pipelines["off"].layers(model.num_layers)[rank])
        everything = initial_weights(model, seed=0)
        weights = {name: everything[name].bfloat16() for name in names}
        self._gradients = zero_gradients(weights)
        self._engines = {
            name: Engine(
                model,
                weights=weights,
                gradients=self._gradients,
                policy="retain",
                pipeline=pipeline,
            )
            for name, pipeline in pipelines.items()
        }
        generator = torch.Generator().manual_seed(0)
        shape = (arguments.sequences, arguments.length + 1)
        self._tokens_MT = torch.randint(0, model.vocab_size, shape, generator=generator)
        self._done: dict[str, Any] = {}

    def _msp_program(self, model: Any) -> Any:
        """Return the program for equal units and free messages; shards balance causal attention."""
        from dataclasses import replace

        from sppo.cost.flops import partition_costs
        from sppo.schedule.program import step_program

        linear, quadratic = partition_costs(model)
        return step_program(
            "sppo_msp",
            num_ranks=self._arguments.ranks,
            lengths=[[end - start for start, end in pairwise(self._cuts)]]
            * self._arguments.sequences,
            costs=replace(self._costs_of_equal_units(), context_slope=quadratic / linear),
        )

    def step(self, name: str) -> None:
        """Run forward and backward of all sequences."""
        import torch

        from sppo.engine.unit import SequenceData

        torch._foreach_zero_(list(self._gradients.values()))
        data = [SequenceData(row[:-1], row[1:]) for row in self._tokens_MT]
        self._done[name] = self._engines[name].accumulate(data, [self._cuts] * len(data))

    def report(self, seconds: dict[str, list[float]]) -> dict[str, Any] | None:
        """Return the figures of both sides on rank 0; every rank must call this method."""
        from sppo.parallel.host_collectives import HostCollectives
        from sppo.schedule.simulation.simulate import simulate
        from sppo.training.executed_step import executed_timeline
        from sppo.training.ranks import Ranks

        ranks = Ranks(self._mesh, HostCollectives(self._mesh), None)  # type: ignore[arg-type]
        losses = {
            name: ranks.peers.total([float(done.total_loss)])[0]
            for name, done in self._done.items()
        }
        timelines = {name: executed_timeline(done, ranks) for name, done in self._done.items()}
        measured = {name: timeline for name, timeline in timelines.items() if timeline is not None}
        if not measured:
            return None
        costs = self._costs_of_equal_units()
        simulated = {n: simulate(t.schedule, costs=costs).makespan_s for n, t in measured.items()}
        if self._arguments.plot is not None:
            from sppo.plots.timeline import write_png

            write_png(self._arguments.plot, timelines=[measured[name] for name in SIDES])
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        return {
            "ranks": self._arguments.ranks,
            "model": MODEL,
            "dtype": "bf16",
            "length": self._arguments.length,
            "subsequences": self._arguments.subsequences,
            "boundaries": list(self._cuts),
            "sequences": self._arguments.sequences,
            "steps": self._arguments.steps,
            "step_s": medians,
            "all_step_s": seconds,
            "on_over_off": medians["on"] / medians["off"],
            "ideal": simulated["on"] / simulated["off"],
            "idle_share": {name: t.bubble_fraction for name, t in measured.items()},
            "loss_difference": abs(losses["on"] / losses["off"] - 1),
        }

    def _costs_of_equal_units(self) -> Any:
        from sppo.schedule.costs import abstract_costs

        units = self._arguments.subsequences * self._arguments.sequences
        return abstract_costs(self._arguments.ranks, num_units=units)


if __name__ == "__main__":
    main()
