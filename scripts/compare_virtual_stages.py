"""Compare pipelines with 1, 2, 4 and 8 stages on each rank on one sequence, on the CPU.

Pipeline ranks are processes with one thread each, over gloo. Every rank has an engine for each
number of virtual stages; all engines take their layers from the same initial weights. One stage on
a rank runs SPPO's order, several run the looped order. Steps alternate, so that noise of the
machine affects all. The planned idle share is simulated with predicted costs of each unit, before
any unit is run.

    python scripts/compare_virtual_stages.py --output docs/results/compare_virtual_stages.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from functools import partial
from itertools import pairwise
from typing import Any

from option_types import output_file
from pipeline_ranks import TIMEOUT, provenance, run_ranks, timed_s  # beside this file

from sppo.output_file import write_text

MODEL = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_layers": 16,
    "num_heads": 1,
    "num_kv_heads": 1,
    "mlp_size": 256,
}
"""A layer for each of eight stages on two ranks. The model is narrow: with 32Ki tokens most work is
attention."""


def main() -> None:
    """Start the ranks, measure the orders in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=32768, help="tokens of the sequence")
    parser.add_argument("--subsequences", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--virtual-stages", default="1,2,4,8", help="by commas, 1 among them")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each")
    parser.add_argument("--output", type=output_file, help="write the figures here as JSON")
    arguments = parser.parse_args()
    arguments.virtual = [int(word) for word in arguments.virtual_stages.split(",")]
    if 1 not in arguments.virtual:
        parser.error(f"--virtual-stages {arguments.virtual_stages}: has no 1 to compare with")
    load_before = os.getloadavg()
    measured = run_ranks(_serve, arguments, ranks=arguments.ranks)
    report = {**provenance(), "load_before": load_before, **measured}
    for row in report["orders"]:
        print(
            f"v = {row['virtual_stages']}: step {row['step_s']:.2f} s, {row['over_one']:.3f}x of "
            f"one stage, simulated {row['simulated_over_one']:.3f}x; idle "
            f"{row['idle_share']:.1%}, planned {row['planned_idle_share']:.1%}"
        )
    print(f"losses agree to {report['loss_difference']:.1e}; load before {report['load_before']}")
    if arguments.output is not None:
        write_text(arguments.output, json.dumps(report, indent=1) + "\n")


def _serve(rank: int, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Run one rank; return the figures on rank 0."""
    orders = _Orders(rank, arguments)
    seconds: dict[int, list[float]] = {virtual: [] for virtual in arguments.virtual}
    for turn in range(arguments.steps + 1):
        for virtual in arguments.virtual:
            took_s = timed_s(partial(orders.step, virtual, warms_up=turn == 0))
            if turn:
                seconds[virtual].append(took_s)
                orders.note_idle_share(virtual)
            if rank == 0:
                print(f"  turn {turn} v = {virtual:<3} {took_s:8.2f} s", flush=True)
    return orders.report(seconds)


class _Orders:
    """Engines of one rank, by number of virtual stages."""

    def __init__(self, rank: int, arguments: argparse.Namespace) -> None:
        import torch

        from sppo.config.model import ModelConfig
        from sppo.cost.flops import partition_costs
        from sppo.kernels.native.cpu_allocator import install_cpu_allocator
        from sppo.parallel.host_collectives import HostCollectives
        from sppo.parallel.mesh import Mesh
        from sppo.parallel.mesh_shape import MeshShape
        from sppo.parallel.pipeline_p2p import PipelineLinks
        from sppo.planning.partition import boundaries_by_flops
        from sppo.training.ranks import Ranks

        install_cpu_allocator()
        self._arguments = arguments
        self._model = ModelConfig.model_validate(MODEL)
        linear, quadratic = partition_costs(self._model)
        self._cuts = boundaries_by_flops(
            arguments.length,
            num_subsequences=arguments.subsequences,
            linear=linear,
            quadratic=quadratic,
            alignment=64,
        )
        mesh = Mesh(
            MeshShape(pipeline_parallel=arguments.ranks),
            rank=rank,
            timeout_s=TIMEOUT.total_seconds(),
        ).connect(wraps=max(arguments.virtual) > 1)
        links = PipelineLinks(mesh, device=torch.device("cpu"))
        self._ranks = Ranks(mesh, HostCollectives(mesh), None)  # type: ignore[arg-type]
        self._gradients: dict[int, Any] = {}
        self._engines = {v: self._engine(v, rank=rank, links=links) for v in arguments.virtual}
        generator = torch.Generator().manual_seed(0)
        shape = (arguments.length + 1,)
        self._tokens_T = torch.randint(0, self._model.vocab_size, shape, generator=generator)
        self._done: dict[int, Any] = {}
        self._idle_shares: dict[int, list[float]] = {v: [] for v in arguments.virtual}

    def _engine(self, virtual: int, *, rank: int, links: Any) -> Any:
        from sppo.cost.parameters import stage_shapes
        from sppo.engine.engine import Engine
        from sppo.engine.pipeline import Pipeline
        from sppo.model.gradients import zero_gradients
        from sppo.model.initialize import initial_weights

        pipeline = Pipeline(_schedule(virtual), self._arguments.ranks, rank, virtual, p2p=links)
        stages = pipeline.layers(self._model.num_layers).values()
        everything = initial_weights(self._model, seed=0)
        weights = {
            name: everything[name].bfloat16()
            for layers in stages
            for name in stage_shapes(self._model, layers)
        }
        self._gradients[virtual] = zero_gradients(weights)
        return Engine(
            self._model,
            weights=weights,
            gradients=self._gradients[virtual],
            policy="retain",
            pipeline=pipeline,
        )

    def step(self, virtual: int, *, warms_up: bool) -> None:
        """Run forward and backward of the sequence, or of its first subsequence to warm up."""
        import torch

        from sppo.engine.unit import SequenceData

        torch._foreach_zero_(list(self._gradients[virtual].values()))
        cuts = (0, self._cuts[-1] - self._cuts[-2]) if warms_up else self._cuts
        tokens = self._tokens_T[: cuts[-1] + 1]
        data = SequenceData(tokens[:-1], tokens[1:])
        self._done[virtual] = self._engines[virtual].accumulate([data], [cuts])

    def note_idle_share(self, virtual: int) -> None:
        """Record the idle share of all ranks in the last step; every rank must call this method."""
        from sppo.training.executed_step import executed_timeline

        timeline = executed_timeline(self._done[virtual], self._ranks)
        if timeline is not None:
            self._idle_shares[virtual].append(timeline.bubble_fraction)

    def report(self, seconds: dict[int, list[float]]) -> dict[str, Any] | None:
        """Return the figures of all orders on rank 0; every rank must call this method."""
        losses = {
            virtual: self._ranks.peers.total([float(done.total_loss)])[0]
            for virtual, done in self._done.items()
        }
        if not self._idle_shares[1]:
            return None
        medians = {virtual: statistics.median(times) for virtual, times in seconds.items()}
        planned = {virtual: self._simulated(virtual) for virtual in medians}
        return {
            "model": MODEL,
            "dtype": "bf16",
            "ranks": self._arguments.ranks,
            "length": self._arguments.length,
            "boundaries": list(self._cuts),
            "steps": self._arguments.steps,
            "loss_difference": max(abs(loss / losses[1] - 1) for loss in losses.values()),
            "orders": [
                {
                    "virtual_stages": virtual,
                    "step_s": medians[virtual],
                    "all_step_s": seconds[virtual],
                    "over_one": medians[virtual] / medians[1],
                    "simulated_over_one": planned[virtual].makespan_s / planned[1].makespan_s,
                    "idle_share": statistics.median(self._idle_shares[virtual]),
                    "planned_idle_share": planned[virtual].bubble_fraction,
                }
                for virtual in medians
            ],
        }

    def _simulated(self, virtual: int) -> Any:
        """Return the simulated timeline of the step as it is planned for this machine."""
        from sppo.cost.candidate import Candidate
        from sppo.cost.layer import Workload
        from sppo.cost.stage_cost import stage_costs, stage_seconds
        from sppo.hardware.this_machine import detect_machine
        from sppo.planning.candidate_program import candidate_program
        from sppo.schedule.simulation.simulate import simulate

        candidate = Candidate(
            Workload(self._model, detect_machine(), dtype="bf16"),
            tuple(end - start for start, end in pairwise(self._cuts)),
            pipeline_parallel_degree=self._arguments.ranks,
            schedule=_schedule(virtual),
            virtual_stages=virtual,
            policy="retain",
        )
        costs = stage_costs(candidate, seconds=stage_seconds(candidate))
        return simulate(candidate_program(candidate, costs=costs), costs=costs)


def _schedule(virtual: int) -> str:
    """Return the schedule of ranks with `virtual` stages."""
    return "sppo" if virtual == 1 else "looped_bfs"


if __name__ == "__main__":
    main()
