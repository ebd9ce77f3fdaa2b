"""Weights, gradients and optimizer state of one rank, each in the tier that the plan names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sppo.config import RunConfig
from sppo.cost.memory.stage_memory import DISK_UPDATE_ELEMENTS
from sppo.cost.parameters import parameter_shapes
from sppo.cost.state_tiers import StateTiers
from sppo.engine.providers.streamed_gradients import StreamedGradients
from sppo.engine.providers.streamed_weights import StreamedWeights
from sppo.model.hf import open_hf_weights
from sppo.model.initialize import generate_weights_ahead
from sppo.offload.copy_report import CopyReport
from sppo.offload.state_memory import DiskMemory, LockedHostMemory, StateMemory
from sppo.offload.transfers import Transfers
from sppo.optim.adamw import AdamW
from sppo.optim.host_adamw import HostAdamW
from sppo.optim.optimizer_rows import OptimizerRows
from sppo.optim.sharded_state import ShardedState
from sppo.training.devices.device import Device
from sppo.training.job import Job

_log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class StateTensors:
    """Weights, gradients and optimizer of a rank, and their copies between device and tier.

    Attributes:
        tiers: Tiers of weights, gradients and optimizer state.
        weights: Part of its stages' parameters that this rank holds, in the compute dtype.
        gradients: fp32 sums of gradients over the step: whole, or this rank's rows.
        optimizer: Optimizer of the rows that this rank updates.
        streamed_weights: Weights that are copied to the device stage by stage; None if all weights
            stay on the device.
        streamed_gradients: Gradients that are copied from and to the device stage by stage; None
            if all gradients stay on the device.
        memory: Memory of the tier behind the device; None if all state stays on the device.
        transfers: Copies to and from that tier, closed with the tensors; None if all state stays
            on the device.
    """

    tiers: StateTiers
    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    optimizer: AdamW | HostAdamW
    streamed_weights: StreamedWeights | None
    streamed_gradients: StreamedGradients | None
    memory: StateMemory | None
    transfers: Transfers | None

    @property
    def used_weights(self) -> Mapping[str, Tensor]:
        """Weights that the engine computes with, on the device."""
        return self.weights if self.streamed_weights is None else self.streamed_weights

    @property
    def used_gradients(self) -> Mapping[str, Tensor]:
        """Gradients that the engine adds to, on the device."""
        return self.gradients if self.streamed_gradients is None else self.streamed_gradients

    def drop_pages(self) -> None:
        """Release the memory that caches the file of the state; does nothing without a file."""
        if self.memory is not None:
            self.memory.drop_pages()

    def close(self) -> None:
        """End threads and copies, and unlock host memory; a second call does nothing."""
        if self.transfers is not None:
            self.transfers.close()

    def add_tier_bytes(self, copies: CopyReport) -> CopyReport:
        """Return `copies` with the state behind the device added to its host or disk bytes."""
        weights = tensor_bytes(self.weights) * self.tiers.streams_weights
        gradients = tensor_bytes(self.gradients) * self.tiers.streams_gradients
        optimizer = self.optimizer
        states = optimizer.row_bytes if isinstance(optimizer, HostAdamW) else 0
        behind = weights + gradients + states
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


def make_state(job: Job, tiers: StateTiers, sharded: ShardedState) -> StateTensors:
    """Build the state tensors of step 0: initial weights, zero gradients, zero moments.

    Raises:
        MemoryError: Host memory does not suffice, or may not be page-locked.
        OSError: Disk space does not suffice.
    """
    run, place, stages = job.run, job.device.torch_device, sharded.names_of_stages
    _say_what_stays(run, job.device)
    memory, transfers = _tier(job, tiers)
    on_disk = tiers.optimizer == "disk"
    streamed_weights = streamed_gradients = rows = None
    with ExitStack() as on_failure:
        if transfers is not None:
            on_failure.enter_context(closing(transfers))
        if tiers.offloads_optimizer:
            rows = OptimizerRows(sharded.owned_shapes, memory=memory if on_disk else None)
        weights, masters = _start(run, tiers, sharded, memory=memory, rows=rows, place=place)
        gradients = _zero_gradients(tiers, sharded, memory=memory, place=place)
        optimizer: AdamW | HostAdamW
        owned = sharded.owned_rows(weights)
        if rows is None:
            optimizer = AdamW(owned, config=run.optimizer, masters=masters or None)
        else:
            assert transfers is not None, "a tier has copies"
            bucket = {"bucket_elements": DISK_UPDATE_ELEMENTS} if on_disk else {}
            optimizer = HostAdamW(
                owned, config=run.optimizer, rows=rows, transfers=transfers, **bucket
            )
        if transfers is not None and tiers.streams_weights:
            streamed_weights = StreamedWeights(
                weights, stages=stages, device=place, transfers=transfers
            )
        if transfers is not None and tiers.streams_gradients:
            streamed_gradients = StreamedGradients(
                gradients, stages=stages, device=place, transfers=transfers
            )
        on_failure.pop_all()
    return StateTensors(
        tiers,
        weights,
        gradients,
        optimizer,
        streamed_weights,
        streamed_gradients,
        memory,
        transfers,
    )


def _start(
    run: RunConfig,
    tiers: StateTiers,
    sharded: ShardedState,
    *,
    memory: StateMemory | None,
    rows: OptimizerRows | None,
    place: torch.device,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of step 0 in their tier, and the fp32 values that were rounded to them.

    With an offloaded optimizer the fp32 values are written into ``rows``, and the second mapping is
    empty; so it is with fp32 weights, which are not rounded.
    """
    dtype = DTYPES[run.train.dtype]
    weights: dict[str, Tensor] = {}
    if tiers.streams_weights:
        assert memory is not None, "a tier has memory"
        weights = memory.tensors(sharded.resident_shapes, dtype)
    masters: dict[str, Tensor] = {}
    for name, whole in starting_weights(run, sharded.shapes):
        weight = sharded.sharding.cut(name, whole)
        if tiers.streams_weights:
            weights[name].copy_(sharded.resident_part(name, weight.to(dtype)))
        else:
            weights[name] = sharded.resident_part(name, weight.to(device=place, dtype=dtype))
        if rows is not None:
            rows.fill(sharded.owned_rows({name: weight}))
        elif dtype is not torch.float32:
            masters |= sharded.owned_rows({name: weight.to(place)}, copy=True)
    return weights, masters


def _zero_gradients(
    tiers: StateTiers, sharded: ShardedState, *, memory: StateMemory | None, place: torch.device
) -> Mapping[str, Tensor]:
    """Allocate the fp32 sums of gradients in their tier, all zero."""
    shapes = sharded.gradient_shapes
    if tiers.streams_gradients:
        assert memory is not None, "a tier has memory"
        return memory.tensors(shapes, torch.float32)
    return {
        name: torch.zeros(shape, dtype=torch.float32, device=place)
        for name, shape in shapes.items()
    }


def _say_what_stays(run: RunConfig, device: Device) -> None:
    """Log each state tier ``host`` of the run file that has no effect on a CPU."""
    asked = {part: getattr(run.state, part) for part in ("weights", "gradients", "optimizer")}
    if run.optimizer.offload:
        asked["optimizer"] = "host"
    for part, tier in asked.items():
        if device.kind == "cpu" and tier == "host":
            _log.info("state.%s=host: it stays, for a CPU's memory is the host's", part)


def _tier(job: Job, tiers: StateTiers) -> tuple[StateMemory | None, Transfers | None]:
    """Return the memory of the tier behind the device, and the copies to and from it."""
    if not tiers.leaves_device:
        return None, None
    limit_s, disk = job.failed_step_timeout_s, job.run.activations.disk
    if "disk" in (tiers.weights, tiers.gradients, tiers.optimizer):
        assert disk is not None, "checked with the run file"
        memory = DiskMemory(Path(disk))
        return memory, job.device.transfers(memory, failed_step_timeout_s=limit_s)
    transfers = job.device.transfers(None, failed_step_timeout_s=limit_s)
    return LockedHostMemory(transfers), transfers


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


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the total bytes of `tensors`."""
    return sum(t.numel() * t.element_size() for t in tensors.values())
