"""Training state of one rank (weights, gradients, optimizer), and the engine that runs on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sppo.activations.subsequence_placement import planned_placement
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
from sppo.parallel.mesh import Mesh
from sppo.parallel.msp_exchange import MspLinks
from sppo.parallel.pipeline_p2p import PipelineLinks
from sppo.parallel.ulysses import UlyssesAllToAll
from sppo.planning.plan import ExecutionPlan
from sppo.schedule.msp_groups import msp_ranges
from sppo.training.devices.communicator_memory import communicators_measured
from sppo.training.job import Job
from sppo.training.state_tensors import StateTensors, make_state


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Tensors of one rank that training changes, and the engine that computes with them."""

    tensors: StateTensors
    engine: Engine
    sharded: ShardedState

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Part of its stages' parameters that this rank holds, by global name."""
        return self.tensors.weights

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """fp32 sums of gradients over the step, by global name: whole, or this rank's rows."""
        return self.tensors.gradients

    @property
    def optimizer(self) -> AdamW | HostAdamW:
        """Optimizer of the rows that this rank updates."""
        return self.tensors.optimizer

    def zero_gradients(self) -> None:
        """Zero the gradients on the device; those in another tier are overwritten by the step."""
        if not self.tensors.tiers.streams_gradients:
            torch._foreach_zero_(list(self.gradients.values()))

    def finish_gradients(self, await_device: Callable[[], None]) -> None:
        """Wait until the rows that this rank updates hold the gradients of all ranks.

        Args:
            await_device: Returns when the device has done all issued work, or raises an error.
                Without this wait the host would block on copies of a rank that hangs.
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
        """Return the Euclidean norm of the gradients of all ranks."""
        return self.sharded.norm(self.gradients, peers, after_each=self._after_each)

    def update(
        self, own: Mapping[str, Tensor], *, norm: Tensor, clip_norm: float, lr: float
    ) -> None:
        """Clip gradients, step the optimizer, and fetch the weights that other ranks updated.

        Args:
            own: Gradients of the rows that this rank updates; scaled in place.
            norm: Euclidean norm of the gradients of all ranks.
            clip_norm: Norm to which gradients are clipped; 0 to leave them unclipped.
            lr: Learning rate of this step.
        """
        clip_(own, norm=norm, clip_norm=clip_norm, after_each=self._after_each)
        self.optimizer.step(own, lr=lr)
        self.sharded.gather(self.weights)
        self.tensors.drop_pages()

    def close(self) -> None:
        """Free the threads, files and locked memory of the tiers; a second call does nothing."""
        with closing(self.tensors):
            self.engine.close()

    @property
    def _after_each(self) -> Callable[[], None] | None:
        """Function to call after each gradient that is read from a file; None without a file."""
        memory = self.tensors.memory
        return memory.drop_pages if memory and self.tensors.tiers.gradients == "disk" else None


def build_state(job: Job, plan: ExecutionPlan) -> TrainingState:
    """Build the state of a rank at step 0: initial weights, zero gradients, zero moments.

    Args:
        job: Job that trains the run; the groups of its mesh are connected here.
        plan: Plan of the run.
    """
    mesh, device = job.ranks.mesh, job.device
    planned = plan.rank_memory[mesh.at.pipeline].device
    with communicators_measured(mesh, device=device, planned=planned):
        pipeline = _connect(job, plan)
    sharded = ShardedState(
        job.run.model,
        mesh=mesh,
        pipeline=pipeline,
        device=device.torch_device,
        zero=job.run.parallel.zero,
    )
    tensors = make_state(job, plan.state, sharded)
    device.trim()  # frees memory that only the initialization used
    with ExitStack() as on_failure:
        on_failure.enter_context(closing(tensors))
        engine = _build_engine(job, plan, tensors, sharded, pipeline)
        on_failure.enter_context(closing(engine))
        if device.kind == "cuda":  # page-locking takes long, and other ranks would wait in a step
            engine.reserve_host([plan.boundaries] * plan.sequences)
        on_failure.pop_all()
    return TrainingState(tensors, engine, sharded)


def _connect(job: Job, plan: ExecutionPlan) -> Pipeline:
    """Connect the groups of the mesh, and return the rank's place in its pipeline."""
    run, mesh, place = job.run, job.ranks.mesh, job.device.torch_device
    # Steps of samples are planned later, and may take much longer than a step of the longest ones.
    differ = run.data.samples == "documents"
    predicted_step_s = math.inf if differ else plan.predicted.step_s
    timeouts = device_timeouts(run.parallel.timeout_s, predicted_step_s=predicted_step_s)
    mesh.connect(
        timeout_s=timeouts.issued_s if mesh.uses_nccl else None,
        wraps=plan.virtual_stages > 1,
        cuts_units=plan.uses_msp,
        ties_ends=run.model.tie_embeddings,
    )
    if mesh.uses_nccl:
        mesh.send_first_messages()
    program = plan.program()
    msp_links = MspLinks(mesh, device=place) if plan.uses_msp else None
    if msp_links is not None:
        msp_links.connect(msp_ranges(program.msp_groups))
    return Pipeline(
        schedule=plan.schedule,
        num_ranks=mesh.shape.pipeline_parallel,
        rank=mesh.at.pipeline,
        num_virtual=plan.virtual_stages,
        p2p=PipelineLinks(mesh, device=place) if mesh.groups.edges else None,
        planned=program,
        msp_links=msp_links,
    )


def _build_engine(
    job: Job,
    plan: ExecutionPlan,
    tensors: StateTensors,
    sharded: ShardedState,
    pipeline: Pipeline,
) -> Engine:
    """Build the engine of a rank, with the store of its offloaded activations."""
    run, device = job.run, job.device
    disk = None if run.activations.disk is None else Path(run.activations.disk)
    store = None
    if may_offload(run, plan):
        store = device.offload_store(
            plan,
            disk=disk,
            debug=run.activations.debug,
            failed_step_timeout_s=job.failed_step_timeout_s,
        )
    return Engine(
        run.model,
        weights=sharded.provider(tensors.used_weights),
        gradients=sharded.gradient_provider(tensors.used_gradients),
        streamed_weights=tensors.streamed_weights,
        streamed_gradients=tensors.streamed_gradients,
        placements={n: planned_placement(s.subsequences) for n, s in enumerate(plan.stages)},
        offloaded=store,
        kv_offloaded=[n for n, kv in enumerate(plan.kv_of_stages) if kv == "offloaded"],
        kv_recomputed=[n for n, kv in enumerate(plan.kv_of_stages) if kv == "recomputed"],
        input_every=run.activations.input_every,
        pipeline=pipeline,
        exchange=_exchange(run, job.ranks.mesh),
        loss_terms=loss_terms(run),
        stopwatch=device.stopwatch(),
        debug=run.activations.debug,
    )


def may_offload(run: RunConfig, plan: ExecutionPlan) -> bool:
    """Return whether any step of a run may offload activations.

    Each step of samples has a plan of its own, so any of these may offload if there is a tier.
    """
    return plan.offloads_anything or (
        run.data.samples == "documents" and plan.activation_tier != "device"
    )


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
