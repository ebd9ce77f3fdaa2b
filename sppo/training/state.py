"""State that a run changes as it goes, and the engine on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sppo.activations.placement import planned_placement
from sppo.config import RunConfig
from sppo.engine.engine import Engine
from sppo.engine.pipeline import Pipeline
from sppo.kernels.cross_entropy import LossTerms
from sppo.optim.adamw import AdamW, clip_
from sppo.optim.host_adamw import HostAdamW
from sppo.optim.sharded_state import ShardedState
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.job.timeouts import device_timeouts
from sppo.parallel.megatron import MegatronSequenceParallel
from sppo.parallel.mesh import Mesh, alone
from sppo.parallel.msp_exchange import MspLinks
from sppo.parallel.pipeline_p2p import PipelineLinks
from sppo.parallel.ulysses import UlyssesAllToAll
from sppo.planning.plan import ExecutionPlan
from sppo.planning.plan_program import plan_program
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.devices.device import Device
from sppo.training.state_tensors import StateTensors, make_state

GIVE_UP_S = 4.0
"""Seconds that a rank which fails waits for its device, which may wait for other ranks in vain:
once for offloaded tensors, once for training state; both together shorter than the launcher waits
for the others to end by themselves."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Tensors that change in training, and the engine that changes them."""

    tensors: StateTensors
    engine: Engine
    sharded: ShardedState

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Return what this rank keeps of its stages' parameters, by global name."""
        return self.tensors.weights

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """fp32 sums over the step by global name: whole, or this rank's rows of them."""
        return self.tensors.gradients

    @property
    def optimizer(self) -> AdamW | HostAdamW:
        """Optimizer of the rows that are this rank's to update."""
        return self.tensors.optimizer

    def zero_gradients(self) -> None:
        """Begin a step; sums that live in another tier are overwritten in it."""
        if not self.tensors.tiers.streams_gradients:
            torch._foreach_zero_(list(self.gradients.values()))

    def finish_gradients(self, await_device: Callable[[], None]) -> None:
        """Return when gradients are those of all ranks, in the rows that this rank updates.

        Args:
            await_device: returns when the device has done what was issued, or raises what keeps it
                from that; without it the host would wait for copies of a rank that hangs.
        """
        streamed = self.tensors.streamed_gradients
        if streamed is None:
            self.sharded.finish(self.gradients)
            await_device()
            return
        await_device()
        streamed.arrive()
        self.sharded.finish(self.gradients)

    def norm(self, peers: HostCollectives) -> Tensor:
        """Euclidean norm of the gradients of all ranks."""
        return self.sharded.norm(self.gradients, peers, after_each=self._after_each)

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
        clip_(own, norm=norm, clip_norm=clip_norm, after_each=self._after_each)
        self.optimizer.step(own, lr=lr)
        self.sharded.gather(self.weights)
        self.tensors.forget()

    def close(self) -> None:
        """Free threads, files and locked memory behind the device; nothing the second time."""
        with closing(self.tensors):
            self.engine.close()

    @property
    def _after_each(self) -> Callable[[], None] | None:
        """Return what to call between gradients in a file; None where all are in memory."""
        memory = self.tensors.memory
        return memory.forget if memory and self.tensors.tiers.gradients == "disk" else None


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
    # Steps of samples are planned later, and may take many times as long as one of the longest.
    differ = run.data.samples == "documents"
    predicted_step_s = math.inf if differ else plan.predicted.step_s
    timeouts = device_timeouts(run.parallel.timeout_s, predicted_step_s=predicted_step_s)
    mesh.connect(
        timeout_s=timeouts.issued_s if device.group_device is not None else None,
        wraps=plan.virtual_stages > 1,
        cuts_units=plan.shares_units,
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
        msp_links=MspLinks(mesh, device=place) if plan.shares_units else None,
    )
    sharded = ShardedState(
        run.model, mesh=mesh, pipeline=pipeline, device=place, zero=run.parallel.zero
    )
    give_up_s = GIVE_UP_S if mesh.is_distributed else None
    tensors = make_state(
        run, tiers=plan.state_tiers, sharded=sharded, device=device, give_up_s=give_up_s
    )
    device.trim()  # of what only the start needed
    with ExitStack() as on_failure:
        on_failure.enter_context(closing(tensors))
        engine = _build_engine(
            run, plan, tensors, sharded, pipeline, mesh=mesh, device=device, give_up_s=give_up_s
        )
        on_failure.pop_all()
    return TrainingState(tensors, engine, sharded)


def _build_engine(
    run: RunConfig,
    plan: ExecutionPlan,
    tensors: StateTensors,
    sharded: ShardedState,
    pipeline: Pipeline,
    *,
    mesh: Mesh,
    device: Device,
    give_up_s: float | None,
) -> Engine:
    """Make the engine of a rank, with the stores of what it offloads."""
    disk = None if run.activations.disk is None else Path(run.activations.disk)
    shard_stages = range(len(plan.stages) if plan.shares_units else 0)
    stores = device.offload_stores(
        plan,
        count=(1 + len(shard_stages)) * may_offload(run, plan),
        disk=disk,
        debug=run.activations.debug,
        give_up_s=give_up_s,
    )
    return Engine(
        run.model,
        weights=sharded.provider(tensors.used_weights),
        gradients=sharded.gradient_provider(tensors.used_gradients),
        streamed_weights=tensors.streamed_weights,
        streamed_gradients=tensors.streamed_gradients,
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


def may_offload(run: RunConfig, plan: ExecutionPlan) -> bool:
    """Return whether any step of a run may offload activations: those of samples decide anew."""
    return plan.offloads_anything or (run.data.samples == "documents" and plan.tier != "device")


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
    """Return the terms that training adds to the cross entropy."""
    return LossTerms(run.train.label_smoothing, run.train.z_loss)
