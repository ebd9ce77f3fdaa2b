"""One rank's part of a training step of a small model on a grid of ranks, for the rank pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from sppo.engine.engine import Companions, Engine
from sppo.engine.pipeline import Pipeline
from sppo.model.gradients import zero_gradients
from sppo.parallel.data_parallel import StageGroup, add_up
from sppo.parallel.mesh import Mesh, MeshShape
from sppo.parallel.pipeline_p2p import PipelineLinks
from sppo.parallel.ulysses import HeadExchange
from sppo.planning.parameters import stage_shapes
from tests.engine.models import random_sequence, random_weights, tiny_model


@dataclass(frozen=True)
class Case:
    """What the ranks do."""

    variant: str = "gqa, q/k-norm"
    shape: tuple[int, int, int] = (1, 2, 1)
    """dp, pp, sp."""
    schedule: str = "sppo"
    virtual: int = 1
    cuts: tuple[tuple[int, ...], ...] = ((0, 4, 9, 17),)
    """Of each sequence of every replica."""
    policy: str = "keep_attention"
    steps: int = 1
    shared: bool = True
    bucket_bytes: int = 400
    sizes: dict[str, Any] = field(default_factory=lambda: {"num_layers": 4})

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(*self.shape)

    def model(self):
        return tiny_model(self.variant, **self.sizes)

    def sequences(self, step: int, replica: int):
        model, count = self.model(), len(self.cuts)
        first = (step * self.shape[0] + replica) * count
        return [
            random_sequence(model, cuts[-1], seed=first + n) for n, cuts in enumerate(self.cuts)
        ]

    def all_sequences(self, step: int):
        return [s for r in range(self.shape[0]) for s in self.sequences(step, r)]


_LINKS: list[Any] = []
"""(world, what was made in it): communicators are made once for the cases of a shape."""


def mesh_of(rank: int, shape: MeshShape, *, wraps: bool):
    key = (dist.group.WORLD, shape, wraps)
    if not _LINKS or _LINKS[0] != key:
        mesh = Mesh(shape, rank=rank, timeout_s=30.0, wraps=wraps)
        links = None
        if shape.pipeline_parallel > 1:
            links = PipelineLinks(mesh, device=torch.device("cpu"))
        _LINKS[:] = [key, mesh, links]
    return _LINKS[1:]


def run_case(rank: int, case: Case):
    """(loss sum, own rows of gradients by name with the rows, trace, program) of each step."""
    return list(_steps(rank, case))


def _steps(rank: int, case: Case):
    torch.set_default_dtype(torch.float32)
    model = case.model()
    mesh, links = mesh_of(rank, case.mesh, wraps=case.virtual > 1)
    at = mesh.at
    pipeline = Pipeline(case.schedule, case.shape[1], at.pipeline, case.virtual, courier=links)
    everything = random_weights(model)
    of_stage = {s: stage_shapes(model, ls) for s, ls in pipeline.layers(model.num_layers).items()}
    shapes = {name: shape for part in of_stage.values() for name, shape in part.items()}
    weights = {name: everything[name] for name in shapes}
    gradients = zero_gradients(weights)
    members = mesh.stage_ranks
    stage_group = StageGroup(
        mesh.groups.stage,
        index=members.index(rank),
        shapes=shapes,
        shared=case.shared,
        bucket_bytes=case.bucket_bytes,
    )
    exchange = None
    if case.shape[2] > 1:
        exchange = HeadExchange(
            mesh.groups.sequence,
            rank=at.sequence,
            num_heads=model.num_heads,
            kv_heads=model.kv_heads,
        )

    def reduce(stage: int) -> None:
        stage_group.reduce(gradients, of_stage[stage])

    engine = Engine(
        model,
        weights=weights,
        gradients=gradients,
        policy=case.policy,
        pipeline=pipeline,
        companions=Companions(exchange, reduce),
    )
    for step in range(case.steps):
        for gradient in gradients.values():
            gradient.zero_()
        valid = sum(data.num_valid for data in case.all_sequences(step))
        done = engine.accumulate(case.sequences(step, at.data), list(case.cuts), num_valid=valid)
        stage_group.wait()
        if model.tie_embeddings and case.shape[1] > 1 and "embed.weight" in shapes:
            add_up([gradients["embed.weight"]], mesh.groups.ends, what="tied")
        rows = {name: stage_group.own_rows(name) for name in shapes}
        yield (
            float(done.total_loss),
            valid,
            {n: (rows[n], gradients[n][rows[n]].clone()) for n in shapes},
            [str(executed.action) for executed in done.trace],
            [str(action) for action in done.schedule.programs[at.pipeline]],
        )
