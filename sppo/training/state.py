"""Training state of one rank: weights, gradients and optimizer in their tiers, and the engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sppo.activations.subsequence_placement import planned_placement
from sppo.config import RunConfig
from sppo.cost.communicators import CommunicatorUse
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.cost.memory.state_memory import DISK_UPDATE_ELEMENTS
from sppo.cost.parameters import Shape, parameter_shapes
from sppo.cost.state_tiers import StateTiers
from sppo.engine.engine import Engine
from sppo.engine.pipeline import Pipeline
from sppo.engine.providers.streamed_rows import StreamedGradients, StreamedWeights
from sppo.kernels.cross_entropy import LossTerms
from sppo.model.hf_reading import open_hf_weights
from sppo.model.initialize import generate_weights_ahead
from sppo.offload.block_store import BlockStore
from sppo.offload.copy_report import CopyReport
from sppo.offload.lane import Lane
from sppo.offload.state_memory import DiskMemory, StateMemory
from sppo.optim.adamw import AdamW
from sppo.optim.gradient_norm import clip_
from sppo.optim.host_adamw import HostAdamW
from sppo.optim.optimizer_rows import OptimizerRows
from sppo.optim.sharded_state import ShardedState
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.job.timeouts import issued_timeout, stall_timeout
from sppo.parallel.megatron import MegatronSequenceParallel
from sppo.parallel.mesh import Mesh
from sppo.parallel.msp_exchange import MspLinks
from sppo.parallel.pipeline_p2p import PipelineLinks
from sppo.parallel.ulysses import UlyssesAllToAll
from sppo.planning.plan import ExecutionPlan
from sppo.schedule.msp_groups import msp_ranges
from sppo.training.job import Job
from sppo.units import format_bytes

_log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Tensors of one rank that training changes, and the engine that computes with them."""

    sharded: ShardedState
    """Part of the state that this rank holds, and its exchange with other ranks."""
    tiers: StateTiers
    """Tiers of weights, gradients and optimizer state."""
    weights: Mapping[str, Tensor]
    """Flat rows of its stages' weights in the compute dtype: whole, or this rank's shards."""
    gradients: Mapping[str, Tensor]
    """Flat rows of fp32 sums of gradients over the step: whole, or this rank's shards."""
    optimizer: AdamW | HostAdamW
    """Optimizer of what this rank updates."""
    memory: StateMemory | None
    """Memory of the tier behind the device; None if all state stays on the device."""
    lane: Lane | None
    """Lane to and from that tier; None if all state stays on the device."""
    engine: Engine

    def zero_gradients(self) -> None:
        """Zero the gradients on the device; those in another tier are overwritten by the step."""
        if not self.tiers.streams_gradients:
            torch._foreach_zero_(list(self.gradients.values()))

    def finish_gradients(self, await_device: Callable[[], None]) -> None:
        """Wait until what this rank updates has the gradients of all ranks.

        Args:
            await_device: Returns when the device has done all issued work, or raises an error.
                Without this wait the host would block on copies of a rank that hangs.
        """
        if self.tiers.streams_gradients:
            await_device()
            self.engine.await_gradients()
            self.sharded.finish(self.gradients)
        else:
            self.sharded.finish(self.gradients)
            await_device()

    def norm(self, peers: HostCollectives) -> Tensor:
        """Return the Euclidean norm of the gradients of all ranks."""
        return self.sharded.norm(self.gradients, peers, after_each=self._after_each)

    def update(
        self, own: Mapping[str, Tensor], *, norm: Tensor, clip_norm: float, lr: float
    ) -> None:
        """Clip gradients, step the optimizer, and fetch the weights that other ranks updated.

        Args:
            own: Gradients of what this rank updates, by global name; scaled in place.
            norm: Euclidean norm of the gradients of all ranks.
            clip_norm: Norm to which gradients are clipped; 0 to leave them unclipped.
            lr: Learning rate of this step.
        """
        clip_(own, norm=norm, clip_norm=clip_norm, after_each=self._after_each)
        self.optimizer.step(own, lr=lr)
        self.sharded.gather(self.weights)
        self.drop_pages()

    def drop_pages(self) -> None:
        """Release the memory that caches the file of the state; does nothing without a file."""
        if self.memory is not None:
            self.memory.drop_pages()

    @property
    def _after_each(self) -> Callable[[], None] | None:
        """Function to call after each gradient that is read from a file; None without a file."""
        return self.drop_pages if self.tiers.gradients == "disk" else None

    def close(self) -> None:
        """Free the threads, files and locked memory of the tiers; a second call does nothing."""
        with ExitStack() as stack:
            if self.lane is not None:
                stack.enter_context(closing(self.lane))
            self.engine.close()

    def add_tier_bytes(self, copies: CopyReport) -> CopyReport:
        """Return `copies` with the state behind the device added to its host or disk bytes."""
        behind = tensor_bytes(self.weights) * self.tiers.streams_weights
        behind += tensor_bytes(self.gradients) * self.tiers.streams_gradients
        if isinstance(self.optimizer, HostAdamW):
            behind += self.optimizer.row_bytes
        if self.tiers.optimizer == "disk":
            return replace(copies, disk_bytes=copies.disk_bytes + behind)
        return replace(copies, host_bytes=copies.host_bytes + behind)

    @property
    def device_bytes(self) -> tuple[int, int, int]:
        """Bytes of (weights, gradients, optimizer states) that stay on the device."""
        tiers, optimizer = self.tiers, self.optimizer
        weights = 0 if tiers.streams_weights else tensor_bytes(self.weights)
        gradients = 0 if tiers.streams_gradients else tensor_bytes(self.gradients)
        if isinstance(optimizer, HostAdamW):
            return weights, gradients, optimizer.bucket_bytes * (tiers.optimizer == "disk")
        own = {t.untyped_storage()._cdata for t in self.weights.values()}
        states = optimizer.state().items()
        others = {n: t for n, t in states if t.untyped_storage()._cdata not in own}
        return weights, gradients, tensor_bytes(others)


def build_state(job: Job, plan: ExecutionPlan) -> TrainingState:
    """Build the state of a rank at step 0: initial weights, zero gradients, zero moments.

    The groups of the mesh are connected here.

    Raises:
        MemoryError: Device or host memory does not suffice, or may not be page-locked.
        OSError: Disk space does not suffice.
    """
    run, device, tiers = job.run, job.device, plan.state
    place, pipeline = device.torch_device, _connect(job, plan)
    sharded = ShardedState(
        run.model, mesh=job.mesh, pipeline=pipeline, device=place, zero=run.parallel.zero
    )
    with ExitStack() as on_failure:
        memory, lane = _tier(job, tiers)
        if lane is not None:
            on_failure.enter_context(closing(lane))
        rows = partial(_zero_rows, memory=memory, place=place)
        weights = rows(sharded.weight_shapes, DTYPES[run.train.dtype], tiers.streams_weights)
        optimizer = _optimizer(job, tiers, sharded, weights, memory=memory, lane=lane)
        gradients = rows(sharded.gradient_shapes, torch.float32, tiers.streams_gradients)
        streamed = {"stages": sharded.keys_of_stages, "device": place, "lane": lane}
        used = StreamedWeights(weights, **streamed) if tiers.streams_weights else weights
        sums = StreamedGradients(gradients, **streamed) if tiers.streams_gradients else gradients
        device.trim()  # frees memory that only the initialization used
        engine = Engine(
            run.model,
            weights=sharded.provider(used),
            gradients=sharded.gradient_provider(sums),
            pipeline=pipeline,
            offloaded=_block_store(job, plan),
            loss_terms=loss_terms(run),
            stopwatch=device.stopwatch(),
            debug=run.activations.debug,
        )
        on_failure.enter_context(closing(engine))
        if device.kind == "cuda":  # page-locking takes long, and other ranks would wait in a step
            engine.reserve_host([plan.boundaries] * plan.sequences)
        on_failure.pop_all()
    return TrainingState(sharded, tiers, weights, gradients, optimizer, memory, lane, engine)


def _connect(job: Job, plan: ExecutionPlan) -> Pipeline:
    """Connect the groups of the mesh, and return the rank's place in its pipeline.

    Raises:
        MemoryError: See :func:`check_communicators`.
    """
    run, mesh, place = job.run, job.mesh, job.device.torch_device
    free_before = job.device.free_bytes(local_ranks=1)
    # Steps of samples are planned later, and may take much longer than a step of the longest ones.
    differ = run.data.samples == "documents"
    predicted_step_s = math.inf if differ else plan.predicted.step_s
    stall_timeout_s = stall_timeout(run.parallel.timeout_s, predicted_step_s=predicted_step_s)
    mesh.connect(
        CommunicatorUse.of(plan.candidate()),
        timeout_s=issued_timeout(stall_timeout_s) if mesh.uses_nccl else None,
    )
    if mesh.uses_nccl:
        mesh.send_first_messages()
    program = plan.program()
    msp_links = MspLinks(mesh, device=place) if plan.uses_msp else None
    if msp_links is not None:
        msp_links.connect(msp_ranges(program.msp_groups))
    if mesh.uses_nccl:
        planned = plan.rank_memory[mesh.at.pipeline].device
        left_bytes = job.device.free_bytes(local_ranks=1)
        check_communicators(free_before - left_bytes, left_bytes=left_bytes, planned=planned)
    return Pipeline(
        schedule=plan.schedule,
        num_ranks=mesh.shape.pipeline_parallel,
        rank=mesh.at.pipeline,
        num_virtual=plan.virtual_stages,
        p2p=PipelineLinks(mesh, device=place) if mesh.groups.edges else None,
        planned=program,
        placements={n: planned_placement(s.subsequences) for n, s in enumerate(plan.stages)},
        kv_offloaded=[n for n, kv in enumerate(plan.kv_of_stages) if kv == "offloaded"],
        kv_recomputed=[n for n, kv in enumerate(plan.kv_of_stages) if kv == "recomputed"],
        msp_links=msp_links,
        input_every=run.activations.input_every,
        exchange=_exchange(run, mesh),
    )


def check_communicators(taken_bytes: int, *, left_bytes: int, planned: MemoryBuckets) -> None:
    """Compare the device memory that NCCL has taken for communicators with the plan.

    Args:
        taken_bytes: Device memory that the communicators took.
        left_bytes: Free device memory after that.
        planned: Memory of the rank's device in the plan.

    Raises:
        MemoryError: The memory that is left is less than the plan needs beside communicators.
    """
    expected = planned.communicators_bytes
    needed = planned.total_bytes - expected
    found = (
        f"NCCL's communicators take {format_bytes(max(0, taken_bytes))} of the device, planned "
        f"{format_bytes(expected)}"
    )
    remedy = (
        "set NCCL_BUFFSIZE=2097152 in the environment of every rank (half of NCCL's largest "
        "buffers), or solve again with a larger hardware.margin"
    )
    if needed > left_bytes:
        raise MemoryError(
            f"{found}; the plan needs {format_bytes(needed)} beside them, and "
            f"{format_bytes(left_bytes)} are left: {remedy}, or with parallel.multiplexed=off if "
            "it is on"
        )
    if taken_bytes > expected:
        _log.warning("%s: if memory runs out, %s", found, remedy)
    else:
        _log.info("%s", found)


def _block_store(job: Job, plan: ExecutionPlan) -> BlockStore | None:
    """Return the store of offloaded activations; None if no step may offload any."""
    config = job.run.activations
    if not may_offload(job.run, plan):
        return None
    return job.device.block_store(
        plan,
        disk=None if config.disk is None else Path(config.disk),
        debug=config.debug,
        failed_step_timeout_s=job.failed_step_timeout_s,
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


# Tensors in their tiers


def _tier(job: Job, tiers: StateTiers) -> tuple[StateMemory | None, Lane | None]:
    """Return the memory of the tier behind the device, and the lane to and from it."""
    run, device, limit_s = job.run, job.device, job.failed_step_timeout_s
    for part in ("weights", "gradients", "optimizer"):
        if device.kind == "cpu" and getattr(run.state, part) == "host":
            _log.info("state.%s=host: it stays, for a CPU's memory is the host's", part)
    if not tiers.leaves_device:
        return None, None
    if "disk" in (tiers.weights, tiers.gradients, tiers.optimizer):
        assert run.activations.disk is not None, "checked with the run file"
        memory = DiskMemory(Path(run.activations.disk))
        return memory, device.state_lane(memory, failed_step_timeout_s=limit_s)
    lane = device.state_lane(None, failed_step_timeout_s=limit_s)
    return StateMemory(lane), lane


def _zero_rows(
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    is_streamed: bool,
    *,
    memory: StateMemory | None,
    place: torch.device,
) -> Mapping[str, Tensor]:
    """Allocate rows of zeros on the device, or, if streamed, rows in the memory of the tier."""
    if is_streamed:
        assert memory is not None, "a tier has memory"
        return memory.tensors(shapes, dtype)
    return {key: torch.zeros(shape, dtype=dtype, device=place) for key, shape in shapes.items()}


def _optimizer(
    job: Job,
    tiers: StateTiers,
    sharded: ShardedState,
    weights: Mapping[str, Tensor],
    *,
    memory: StateMemory | None,
    lane: Lane | None,
) -> AdamW | HostAdamW:
    """Fill rows with the weights of step 0; return the optimizer of what this rank updates.

    The fp32 values that are rounded to narrower weights start as masters of the optimizer; those
    of an offloaded optimizer are written where they stay, one by one.
    """
    run, config = job.run, job.run.optimizer
    on_disk, rows = tiers.optimizer == "disk", None
    if tiers.offloads_optimizer:
        rows = OptimizerRows(sharded.owned_shapes, memory=memory if on_disk else None)
    masters: dict[str, Tensor] = {}
    for name, whole in starting_weights(run, sharded.shapes):
        weight = sharded.sharding.cut(name, whole)
        sharded.fill(weights, name, weight)
        if rows is not None:
            rows.fill(sharded.owned_of(name, weight))
        elif DTYPES[run.train.dtype] is not torch.float32:
            own = sharded.owned_of(name, weight)
            masters |= {n: m.to(job.device.torch_device, copy=True) for n, m in own.items()}
    if rows is None:
        return AdamW(sharded.owned(weights), config=config, masters=masters or None)
    assert lane is not None, "a tier has a lane"
    bucket = {"bucket_elements": DISK_UPDATE_ELEMENTS} if on_disk else {}
    return HostAdamW(sharded.owned(weights), config=config, rows=rows, lane=lane, **bucket)


def starting_weights(
    run: RunConfig, names: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, fp32 weight) of step 0: from ``model.from_hf``, or random from the seed.

    Args:
        run: Validated run configuration.
        names: Names of the weights to yield; None for all.
    """
    every = parameter_shapes(run.model)
    shapes = every if names is None else {name: every[name] for name in names}
    if run.model.from_hf is None:
        threads = torch.get_num_threads()
        yield from generate_weights_ahead(
            shapes, model=run.model, seed=run.train.seed, threads=threads
        )
        return
    stored = open_hf_weights(Path(run.model.from_hf), run.model)
    for name in shapes:
        yield name, stored[name].float()


def check_weights(run: RunConfig) -> None:
    """Check headers and tied weights of ``model.from_hf``, if given.

    Raises:
        ValueError: Tensors are missing or unknown, have wrong shapes, or the output projection
            differs from the embedding to which it is tied.
    """
    if run.model.from_hf is not None:
        open_hf_weights(Path(run.model.from_hf), run.model)


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the total bytes of `tensors`."""
    return sum(t.numel() * t.element_size() for t in tensors.values())
