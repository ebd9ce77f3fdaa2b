"""What a run changes as it goes: weights, gradients, optimizer, and the engine on them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sppo.config import RunConfig
from sppo.engine.engine import Engine
from sppo.model.gradients import zero_gradients
from sppo.model.hf import load_hf_weights
from sppo.model.initialize import initial_weights
from sppo.offload.moving_store import MovingStore
from sppo.offload.thread_queues import ThreadQueues
from sppo.offload.tiers import Tier
from sppo.planning.plan import ExecutionPlan
from sppo.planning.row_plan import PlannedRows
from sppo.train.host_optimizer import HostAdamW
from sppo.train.host_transfers import CudaTransfers
from sppo.train.optimizer import AdamW

_log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Live tensors of a run by global name, and the two things that change them."""

    weights: Mapping[str, Tensor]
    """In the compute dtype."""
    gradients: Mapping[str, Tensor]
    """fp32 sums over the step."""
    optimizer: AdamW | HostAdamW
    engine: Engine


def build_state(run: RunConfig, *, plan: ExecutionPlan) -> TrainingState:
    """Weights as the run starts with them, zero gradients, zero moments."""
    masters = starting_weights(run)
    dtype = DTYPES[run.train.dtype]
    weights = {name: master.to(dtype) for name, master in masters.items()}
    narrow = None if dtype is torch.float32 else masters
    gradients = zero_gradients(weights)
    optimizer = build_optimizer(run, weights, masters=narrow)
    (stage,) = plan.stages
    moved = moving_store(run, plan=plan)
    engine = Engine(
        run.model,
        weights=weights,
        gradients=gradients,
        rows={0: PlannedRows(stage.subsequences)},
        moved={} if moved is None else {0: moved},
        input_every=run.activations.input_every,
    )
    return TrainingState(weights, gradients, optimizer, engine)


def build_optimizer(
    run: RunConfig, weights: Mapping[str, Tensor], *, masters: Mapping[str, Tensor] | None
) -> AdamW | HostAdamW:
    """The optimizer where ``optimizer.offload`` wants it.

    Args:
        run: checked.
        weights: on the device that computes.
        masters: fp32 values that narrower weights were rounded from; None where there are none.

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


def moving_store(run: RunConfig, *, plan: ExecutionPlan) -> MovingStore | None:
    """Where moved activations go; None for a plan that moves none."""
    if not plan.moves_anything:
        return None
    directory, debug = run.activations.disk, run.activations.debug
    assert directory is not None, "checked before training"
    tier = Tier("disk", Path(directory))
    # Compute waits for each copy out. Into a free staging slot that is a memory copy, which takes
    # the same cores either way. Where none is free, for the disk is slow, running ahead would hold
    # the moved tensors of one more layer than there is memory planned for.
    return MovingStore(ThreadQueues(poison=debug), tier=tier, source_lag=0, checksums=debug)


def starting_weights(run: RunConfig) -> dict[str, Tensor]:
    """fp32 weights of step 0: from ``model.from_hf``, or random from the seed."""
    if run.model.from_hf is None:
        return initial_weights(run.model, seed=run.train.seed)
    stored = load_hf_weights(Path(run.model.from_hf), run.model)
    return {name: weight.float() for name, weight in stored.items()}
