"""SPPO's side of ``compare_pipelining.py``: the engine as ``sppo train`` sets it up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sppo.config import RunConfig, check_run
from sppo.cost.parameters import stage_shapes
from sppo.engine.engine import Engine, StepResult
from sppo.engine.pipeline import Pipeline
from sppo.engine.unit import SequenceData
from sppo.hardware.this_machine import detect_machine, usable_memory_bytes
from sppo.kernels.native.cpu_allocator import install_cpu_allocator
from sppo.model.gradients import zero_gradients
from sppo.model.initialize import initial_weights
from sppo.parallel.mesh import Mesh
from sppo.parallel.mesh_shape import MeshShape
from sppo.parallel.pipeline_p2p import PipelineLinks
from sppo.planning.run_plan import plan_run
from sppo.schedule.actions import ActionKind
from sppo.training.steps.warm_up import warm_up

WARM_UP_TOKENS = 512
TIMEOUT_S = 7200.0
_COMPUTE = (ActionKind.F, ActionKind.B, ActionKind.W)


def run_of(
    model: Mapping[str, int],
    *,
    length: int,
    num_subsequences: int,
    sequences: int,
    ranks: int,
    schedule: str,
    partition: str,
) -> RunConfig:
    """Return a run that retains everything, so that neither side recomputes anything."""
    keys = {
        "model": dict(model),
        "data": {"tokens": "."},
        "sequence": {
            "length": length,
            "num_subsequences": num_subsequences,
            "partition": partition,
        },
        "parallel": {
            "pipeline_parallel_degree": ranks,
            "schedule": schedule,
            "multiplexed": "off",  # what that gains is compared by compare_msp.py
        },
        "activations": {"policy": "retain"},
        "train": {"dtype": "bf16", "sequences_per_step": sequences},
    }
    return check_run(keys, source="scripts/compare_pipelining.py")


class SppoPipeline:
    """One rank of SPPO's pipeline.

    Args:
        run: Validated run configuration.
        tokens_MT: Tokens of M sequences, each with one more token than its length: the last is a
            label.
        rank: Rank in the default process group, which is the pipeline.
    """

    def __init__(self, run: RunConfig, tokens_MT: Tensor, *, rank: int) -> None:
        self._pool = install_cpu_allocator()  # as `sppo train` does
        self._run, self._tokens_MT = run, tokens_MT
        self._plan = plan_run(run, hardware=detect_machine(), available_bytes=usable_memory_bytes())
        degree, model = run.parallel.pipeline_parallel_degree, run.model
        mesh = Mesh(MeshShape(pipeline_parallel=degree), rank=rank, timeout_s=TIMEOUT_S)
        mesh.connect()
        links = PipelineLinks(mesh, device=torch.device("cpu"))
        pipeline = Pipeline(self._plan.schedule, degree, rank, p2p=links)
        names = stage_shapes(model, pipeline.layers(model.num_layers)[rank])
        everything = initial_weights(model, seed=0)
        weights = {name: everything[name].bfloat16() for name in names}
        self._gradients = zero_gradients(weights)
        self._engine = Engine(
            model, weights=weights, gradients=self._gradients, policy="retain", pipeline=pipeline
        )
        self._done: StepResult | None = None

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the fp32 gradient sums, which exist between steps."""
        return sum(gradient.nbytes for gradient in self._gradients.values())

    def warm_up(self) -> None:
        """Warm up as ``sppo train`` does, and run a short step through the pipeline."""
        warm_up(self._run, lengths=self._plan.lengths)
        tokens_MT = self._tokens_MT[:, : WARM_UP_TOKENS + 1]
        self._accumulate(tokens_MT, (0, tokens_MT.shape[1] - 1))

    def trim(self) -> None:
        """Return unused memory of the pool to the system."""
        if self._pool is not None:
            self._pool.trim()

    def step(self) -> None:
        """Run forward and backward of all sequences."""
        self._done = self._accumulate(self._tokens_MT, self._plan.boundaries)

    def findings(self) -> dict[str, Any]:
        """Return figures of the last step."""
        done = self._done
        assert done is not None, "after a step"
        busy_s = sum(e.finish_s - e.start_s for e in done.trace if e.action.kind in _COMPUTE)
        norms = torch._foreach_norm(list(self._gradients.values()))
        return {
            "schedule": self._plan.schedule,
            "boundaries": list(self._plan.boundaries),
            "planned_bubble_fraction": self._plan.predicted.bubble_fraction,
            "busy_s": busy_s,
            "loss": float(done.total_loss) / done.num_valid,
            "gradient_norm": float(torch.stack(list(norms)).norm()),
        }

    def _accumulate(self, tokens_MT: Tensor, cuts: tuple[int, ...]) -> StepResult:
        torch._foreach_zero_(list(self._gradients.values()))
        data = [SequenceData(tokens_T[:-1], tokens_T[1:]) for tokens_T in tokens_MT]
        return self._engine.accumulate(data, [cuts] * len(data))
