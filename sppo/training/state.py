"""Training state of one rank: weights, gradients and optimizer in their tiers, and the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sppo.checkpoint.newest import Checkpoint
from sppo.config import RunConfig
from sppo.cost.memory.state_memory import DISK_UPDATE_ELEMENTS
from sppo.cost.parameters import Shape
from sppo.cost.state_tiers import StateTiers
from sppo.engine.engine import Engine
from sppo.engine.providers.streamed_rows import StreamedGradients, StreamedWeights
from sppo.kernels.cross_entropy import LossTerms
from sppo.offload.block_store import BlockStore
from sppo.offload.copy_report import CopyReport
from sppo.offload.lane import Lane
from sppo.offload.state_memory import DiskMemory, StateMemory
from sppo.optim.adamw import AdamW
from sppo.optim.gradient_norm import clip_, largest_elements
from sppo.optim.host_adamw import HostAdamW, OptimizerRows
from sppo.optim.sharded_state import ShardedState
from sppo.parallel.host_collectives import HostCollectives
from sppo.planning.plan import ExecutionPlan
from sppo.training.connections import connect_pipeline
from sppo.training.job import Job
from sppo.training.weights.choice_biases import ChoiceBiases, starting_choice_biases
from sppo.training.weights.starting_weights import starting_weights

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
    """Flat rows of fp32 sums of gradients over the step: whole, or this rank's shards; none of
    frozen weights."""
    optimizer: AdamW | HostAdamW
    """Optimizer of what this rank updates."""
    memory: StateMemory | None
    """Memory of the tier behind the device; None if all state stays on the device."""
    lane: Lane | None
    """Lane to and from that tier; None if all state stays on the device."""
    engine: Engine
    choice_biases: ChoiceBiases
    """Biases by which experts are chosen, of all layers."""

    def zero_gradients(self) -> None:
        """Zero the gradients on the device; those in another tier are overwritten by the step."""
        self.sharded.added_norms.clear()
        if self.gradients and not self.tiers.streams_gradients:
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

    def largest_elements(self, own: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the largest magnitude of each gradient of what this rank updates, by name."""
        return largest_elements(own, after_each=self._after_each)

    def norms_by_kind(self, peers: HostCollectives) -> dict[str, dict[str, float]]:
        """Return the norms of fp32 weights and of gradients by kind of parameter. Collective."""
        squares = self.sharded.squares_by_kind
        gradients = squares(self.sharded.owned(self.gradients), after_each=self._after_each)
        weights = squares(self.optimizer.masters, after_each=self._after_each)
        total = peers.total([*weights.values(), *gradients.values()])
        self.drop_pages()
        return {
            kind: {"weight": weight**0.5, "gradient": gradient**0.5}
            for kind, weight, gradient in zip(
                weights, total[: len(weights)], total[len(weights) :], strict=True
            )
        }

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
        behind = self._streamed_weights_bytes
        behind += tensor_bytes(self.gradients) * self.tiers.streams_gradients
        if isinstance(self.optimizer, HostAdamW):
            behind += self.optimizer.row_bytes
        if self.tiers.tier == "disk":
            return replace(copies, disk_bytes=copies.disk_bytes + behind)
        return replace(copies, host_bytes=copies.host_bytes + behind)

    @property
    def device_bytes(self) -> tuple[int, int, int]:
        """Bytes of (weights, gradients, optimizer states) that stay on the device."""
        tiers, optimizer = self.tiers, self.optimizer
        weights = tensor_bytes(self.weights) - self._streamed_weights_bytes
        gradients = 0 if tiers.streams_gradients else tensor_bytes(self.gradients)
        if isinstance(optimizer, HostAdamW):
            return weights, gradients, optimizer.bucket_bytes * (tiers.optimizer == "disk")
        own = {t.untyped_storage()._cdata for t in self.weights.values()}
        states = optimizer.state().items()
        others = {n: t for n, t in states if t.untyped_storage()._cdata not in own}
        return weights, gradients, tensor_bytes(others)

    @property
    def _streamed_weights_bytes(self) -> int:
        streamed = self.sharded.streamed_keys(self.tiers)
        return tensor_bytes({key: self.weights[key] for key in streamed})


def build_state(job: Job, plan: ExecutionPlan, *, start: Checkpoint | None = None) -> TrainingState:
    """Build the state of a rank at step 0: initial weights, zero gradients, zero moments.

    The groups of the mesh are connected here.

    Args:
        job: Job that trains the run.
        plan: Plan of its steps.
        start: Checkpoint of another run whose weights are the initial weights, if it is one.

    Raises:
        MemoryError: Device or host memory does not suffice, or may not be page-locked.
        OSError: Disk space does not suffice.
    """
    run, device, tiers = job.run, job.device, plan.state
    place, pipeline = device.torch_device, connect_pipeline(job, plan)
    sharded = ShardedState(
        run.model,
        mesh=job.mesh,
        pipeline=pipeline,
        device=place,
        zero=run.parallel.zero,
        trainable=plan.trainable,
        notes_added=run.train.watch,
    )
    with ExitStack() as on_failure:
        memory, lane = state_tier(job, tiers)
        if lane is not None:
            on_failure.enter_context(closing(lane))
        rows = partial(zero_rows, memory=memory, place=place)
        dtype, sizes = DTYPES[run.train.dtype], sharded.gradient_shapes
        weights = rows(sharded.weight_shapes, dtype, sharded.streamed_keys(tiers))
        initial = starting_weights(run, sharded.shapes, start=start)
        optimizer = _optimizer(job, tiers, sharded, weights, initial, memory=memory, lane=lane)
        gradients = rows(sizes, torch.float32, sizes if tiers.streams_gradients else ())
        streamed = {"stages": sharded.keys_of_stages, "device": place, "lane": lane}
        used = used_weights(weights, sharded, tiers, **streamed)
        sums = StreamedGradients(gradients, **streamed) if tiers.streams_gradients else gradients
        biases = starting_choice_biases(run, start=start, device=place)
        device.trim()  # frees memory that only the initialization used
        engine = Engine(
            run.model,
            weights=sharded.provider(used),
            gradients=sharded.gradient_provider(sums),
            pipeline=pipeline,
            offloaded=_block_store(job, plan),
            loss_terms=loss_terms(run),
            trainable=plan.trainable,
            routing=run.routing,
            choice_biases=biases,
            stopwatch=device.stopwatch(),
            debug=run.activations.debug,
        )
        on_failure.enter_context(closing(engine))
        if device.kind == "cuda":  # page-locking takes long, and other ranks would wait in a step
            engine.reserve_host([plan.boundaries] * plan.sequences)
        on_failure.pop_all()
    return TrainingState(
        sharded, tiers, weights, gradients, optimizer, memory, lane, engine, biases
    )


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


def loss_terms(run: RunConfig) -> LossTerms:
    """Return the terms that training adds to the cross entropy."""
    return LossTerms(run.train.label_smoothing, run.train.z_loss)


# Tensors in their tiers


def state_tier(job: Job, tiers: StateTiers) -> tuple[StateMemory | None, Lane | None]:
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


def zero_rows(
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    in_tier: Collection[str],
    *,
    memory: StateMemory | None,
    place: torch.device,
) -> Mapping[str, Tensor]:
    """Allocate rows of zeros on the device, and those named in ``in_tier`` in the tier's memory."""
    behind: Mapping[str, Tensor] = {}
    if in_tier:
        assert memory is not None, "a tier has memory"
        behind = memory.tensors({key: shapes[key] for key in in_tier}, dtype)
    stay = {key: shape for key, shape in shapes.items() if key not in behind}
    here = {key: torch.zeros(shape, dtype=dtype, device=place) for key, shape in stay.items()}
    return {**behind, **here}


def used_weights(
    rows: Mapping[str, Tensor], sharded: ShardedState, tiers: StateTiers, **streamed: Any
) -> Mapping[str, Tensor]:
    """Return rows of weights as an engine uses them, with those of another tier streamed."""
    if not tiers.streams_weights:
        return rows
    in_tier = {key: rows[key] for key in sharded.streamed_keys(tiers)}
    staying = {key: row for key, row in rows.items() if key not in in_tier}
    return StreamedWeights(in_tier, staying=staying, **streamed)


def _optimizer(
    job: Job,
    tiers: StateTiers,
    sharded: ShardedState,
    weights: Mapping[str, Tensor],
    initial: Iterable[tuple[str, Tensor]],
    *,
    memory: StateMemory | None,
    lane: Lane | None,
) -> AdamW | HostAdamW:
    """Fill rows with the weights of step 0; return the optimizer of what this rank updates.

    The fp32 values that are rounded to narrower weights start as masters of the optimizer, unless
    these are frozen; those of an offloaded optimizer are written where they stay, one by one. A
    rank on which nothing trains has an optimizer of nothing, on the device.
    """
    run, config = job.run, job.run.optimizer
    on_disk, rows = tiers.optimizer == "disk", None
    if tiers.offloads_optimizer and sharded.owned_shapes:
        behind = memory if on_disk else None
        rows = OptimizerRows(sharded.owned_shapes, config=config, memory=behind)
    masters: dict[str, Tensor] = {}
    for name, whole in initial:
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


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the total bytes of `tensors`."""
    return sum(t.numel() * t.element_size() for t in tensors.values())
