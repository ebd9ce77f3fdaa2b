"""What a run changes as it goes: weights, gradients, optimizer, and the engine on them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sppo.activations.placement import planned_placement
from sppo.config import RunConfig
from sppo.cost.parameters import parameter_shapes
from sppo.engine.engine import Engine
from sppo.engine.pipeline import Pipeline
from sppo.kernels.cross_entropy import LossTerms
from sppo.model.hf import open_hf_weights
from sppo.model.initialize import made_ahead
from sppo.optim.adamw import AdamW, clip_
from sppo.optim.host_adamw import HostAdamW
from sppo.optim.host_transfers import CudaTransfers
from sppo.optim.sharded_state import ShardedState
from sppo.parallel.megatron import MegatronSequenceParallel
from sppo.parallel.mesh import Mesh, alone
from sppo.parallel.msp_exchange import MspLinks
from sppo.parallel.pipeline_p2p import PipelineLinks
from sppo.parallel.timeouts import device_timeouts
from sppo.parallel.ulysses import UlyssesAllToAll
from sppo.planning.plan import ExecutionPlan
from sppo.planning.plan_program import plan_program
from sppo.train.cpu_device import CpuDevice
from sppo.train.device import Device

_log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GIVE_UP_S = 5.0
"""Seconds that a rank which fails waits for its device, which may wait for other ranks in vain;
shorter than the launcher waits for the others to end by themselves."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Live tensors of a rank by global name, and what changes them."""

    weights: Mapping[str, Tensor]
    """What this rank keeps of its stages' parameters, in the compute dtype."""
    gradients: Mapping[str, Tensor]
    """fp32 sums over the step: whole, or this rank's rows of them."""
    optimizer: AdamW | HostAdamW
    """Optimizer of the rows that are this rank's to update."""
    engine: Engine
    sharded: ShardedState

    def update(
        self, own: Mapping[str, Tensor], *, norm: Tensor, clip_norm: float, lr: float
    ) -> None:
        """Clip gradients, step the optimizer, and fetch the weights that other ranks updated.

        Args:
            own: gradients in the rows that this rank updates; scaled in place.
            norm: of the gradients of all ranks.
            clip_norm: 0 leaves them alone.
            lr: of this step.
        """
        clip_(own, norm=norm, clip_norm=clip_norm)
        self.optimizer.step(own, lr=lr)
        self.sharded.gather(self.weights)


def build_state(
    run: RunConfig,
    *,
    plan: ExecutionPlan,
    mesh: Mesh | None = None,
    device: Device | None = None,
) -> TrainingState:
    """Weights as the run starts with them, zero gradients, zero moments.

    Args:
        run: checked.
        plan: to follow.
        mesh: of all ranks, which connects them now; None for one.
        device: that this rank computes on; None: the CPU.
    """
    mesh, device = mesh or alone(), device or CpuDevice()
    cuts_units = plan.schedule == "sppo_msp"
    timeouts = device_timeouts(run.parallel.timeout_s, predicted_step_s=plan.predicted.step_s)
    mesh.connect(
        timeout_s=timeouts.issued_s if device.group_device is not None else None,
        wraps=plan.virtual_stages > 1,
        cuts_units=cuts_units,
        ties_ends=run.model.tie_embeddings,
    )
    place = device.torch_device
    pipeline = Pipeline(
        schedule=plan.schedule,
        num_ranks=mesh.shape.pipeline_parallel,
        rank=mesh.at.pipeline,
        num_virtual=plan.virtual_stages,
        p2p=PipelineLinks(mesh, device=place) if mesh.groups.edges else None,
        planned=plan_program(plan),
        msp_links=MspLinks(mesh, device=place) if cuts_units else None,
    )
    sharded = ShardedState(run.model, mesh=mesh, pipeline=pipeline, zero=run.parallel.zero)
    dtype = DTYPES[run.train.dtype]
    weights: dict[str, Tensor] = {}
    masters: dict[str, Tensor] = {}
    for name, weight in starting_weights(run, sharded.shapes):
        weight = sharded.sharding.cut(name, weight)
        weights[name] = sharded.kept(name, weight.to(device=place, dtype=dtype))
        if dtype is not torch.float32:
            master = weight if run.optimizer.offload else weight.to(place)
            masters |= sharded.own({name: master}, copy=True)
    gradients = {
        name: torch.zeros(shape, dtype=torch.float32, device=place)
        for name, shape in sharded.gradient_shapes.items()
    }
    optimizer = build_optimizer(run, sharded.own(weights), masters=masters or None)
    disk = None if run.activations.disk is None else Path(run.activations.disk)
    shard_stages = range(len(plan.stages) if cuts_units else 0)
    stores = device.offload_stores(
        plan,
        count=1 + len(shard_stages),
        disk=disk,
        debug=run.activations.debug,
        give_up_s=GIVE_UP_S if mesh.is_distributed else None,
    )
    engine = Engine(
        run.model,
        weights=sharded.provider(weights),
        gradients=sharded.gradient_provider(gradients),
        placements={n: planned_placement(s.subsequences) for n, s in enumerate(plan.stages)},
        offloaded=stores[0] if stores else None,
        kv_offloaded=[n for n, s in enumerate(plan.stages) if s.kv == "offloaded"],
        kv_recomputed=[n for n, s in enumerate(plan.stages) if s.kv == "recomputed"],
        offloaded_shards=dict(zip(shard_stages, stores[1:], strict=False)),
        input_every=run.activations.input_every,
        pipeline=pipeline,
        exchange=_exchange(run, mesh),
        loss_terms=loss_terms(run),
        stopwatch=device.stopwatch(),
        debug=run.activations.debug,
    )
    return TrainingState(weights, gradients, optimizer, engine, sharded)


def _exchange(run: RunConfig, mesh: Mesh) -> UlyssesAllToAll | MegatronSequenceParallel | None:
    if mesh.groups.sequence is None:
        return None
    if mesh.shape.key_copies is not None:
        return MegatronSequenceParallel(
            mesh.groups.sequence, rank=mesh.at.sequence, model=run.model
        )
    return UlyssesAllToAll(
        mesh.groups.sequence,
        rank=mesh.at.sequence,
        num_heads=run.model.num_heads,
        kv_heads=run.model.kv_heads,
    )


def loss_terms(run: RunConfig) -> LossTerms:
    """What training adds to the cross entropy."""
    return LossTerms(run.train.label_smoothing, run.train.z_loss)


def build_optimizer(
    run: RunConfig, weights: Mapping[str, Tensor], *, masters: Mapping[str, Tensor] | None
) -> AdamW | HostAdamW:
    """The optimizer where ``optimizer.offload`` wants it.

    Args:
        run: checked.
        weights: on the device that computes.
        masters: fp32 values that weights in the compute dtype were rounded from; None where there
            are none.

    Raises:
        MemoryError: the host has not the memory, or may not lock its part of it.
    """
    device = next(iter(weights.values())).device
    if not run.optimizer.offload:
        return AdamW(weights, config=run.optimizer, masters=masters)
    if device.type == "cpu":
        _log.info(
            "optimizer.offload: the optimizer stays where it is, for a CPU's memory is the host's"
        )
        return AdamW(weights, config=run.optimizer, masters=masters)
    return HostAdamW(
        weights, config=run.optimizer, transfers=CudaTransfers(device), masters=masters
    )


def starting_weights(
    run: RunConfig, names: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """fp32 weights of step 0 by name: from ``model.from_hf``, or random from the seed.

    Args:
        run: checked.
        names: of those to make; None for all.
    """
    every = parameter_shapes(run.model)
    shapes = every if names is None else {name: every[name] for name in names}
    if run.model.from_hf is None:
        threads = torch.get_num_threads()
        yield from made_ahead(shapes, model=run.model, seed=run.train.seed, threads=threads)
        return
    stored = open_hf_weights(Path(run.model.from_hf), run.model)
    for name in shapes:
        yield name, stored[name].float()
