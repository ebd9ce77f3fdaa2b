"""What a run changes as it goes: weights, gradients, optimizer, and the engine on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sppo.config import RunConfig
from sppo.engine.single import SingleRankEngine
from sppo.model.gradients import zero_gradients
from sppo.model.hf import load_hf_weights
from sppo.model.initialize import initial_weights
from sppo.planning.plan import ExecutionPlan
from sppo.train.optimizer import AdamW

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Live tensors of a run by global name, and the two things that change them."""

    weights: Mapping[str, Tensor]
    """In the compute dtype."""
    gradients: Mapping[str, Tensor]
    """fp32 sums over the step."""
    optimizer: AdamW
    engine: SingleRankEngine


def build_state(run: RunConfig, *, plan: ExecutionPlan) -> TrainingState:
    """Weights as the run starts with them, zero gradients, zero moments."""
    masters = starting_weights(run)
    dtype = DTYPES[run.train.dtype]
    weights = {name: master.to(dtype) for name, master in masters.items()}
    narrow = None if dtype is torch.float32 else masters
    gradients = zero_gradients(weights)
    optimizer = AdamW(weights, config=run.optimizer, masters=narrow)
    engine = SingleRankEngine(
        run.model,
        weights=weights,
        gradients=gradients,
        kept_classes=kept_classes(plan),
        input_every=run.activations.input_every,
    )
    return TrainingState(weights, gradients, optimizer, engine)


def kept_classes(plan: ExecutionPlan) -> tuple[tuple[int, ...], ...]:
    """Tensor classes that the plan's only stage keeps of each subsequence.

    Raises:
        ValueError: the plan moves activations or cuts a class, which this version cannot run.
    """
    classes = []
    for index, part in enumerate(plan.stages[0].subsequences):
        cut = any(0 < kept < plan.lengths[index] for kept in part.kept)
        if any(part.moved) or cut:
            raise ValueError(
                f"the plan moves or cuts saved activations of subsequence {index}, which this "
                "version cannot train with yet: solve again with activations.policy=retain, "
                "keep_attention or recompute"
            )
        classes.append(tuple(c for c, kept in enumerate(part.kept) if kept))
    return tuple(classes)


def starting_weights(run: RunConfig) -> dict[str, Tensor]:
    """fp32 weights of step 0: from ``model.from_hf``, or random from the seed."""
    if run.model.from_hf is None:
        return initial_weights(run.model, seed=run.train.seed)
    stored = load_hf_weights(Path(run.model.from_hf), run.model)
    return {name: weight.float() for name, weight in stored.items()}
