"""Parameters of each stage: those that a device computes with, updates, or sends to other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod

import numpy as np

from sppo.config.model import ModelConfig
from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.parameters import layer_parameters, outer_shapes
from sppo.cost.sharding.weight_parts import layer_by_copies, outer_by_copies
from sppo.schedule.costs import Table


def stage_parameters(model: ModelConfig, stages: Sequence[range], *, is_pipeline: bool) -> Table:
    """Return the parameters of each stage: layers, embedding on the first, head on the last.

    Args:
        model: Shape of the model.
        stages: Layers of each stage.
        is_pipeline: Whether the last stage is on another rank than the first.
    """
    layer = layer_parameters(model)
    counts = np.array([float(layer * len(layers)) for layers in stages])
    for name, shape in outer_shapes(model).items():
        counts[0 if name.startswith(("embed.", "positions.")) else -1] += prod(shape)
    if model.tie_embeddings and is_pipeline:
        # The last stage has a copy of the tied embedding.
        counts[-1] += model.vocab_size * model.hidden_size
    return counts


def lent_parameters(candidate: Candidate) -> Table:
    """Return the parameters of each stage that a device sends to a borrower (MSP), [stages].

    Only layers count: embedding and head stay with the owner. Each device of a sequence-parallel
    group sends its part, and the borrower's group gathers the parts over its fast links.
    """
    workload = candidate.workload
    layer = layer_parameters(workload.model)
    counts = np.array([float(layer * len(layers)) for layers in candidate.stages])
    return counts / workload.sequence_parallel_degree


def device_parameters(candidate: Candidate) -> Table:
    """Return the parameters a device computes with, [stages]; only Megatron shards them."""
    counts: Table = sum(parameters_by_copies(candidate).values(), np.zeros(len(candidate.stages)))
    return counts


def updated_parameters(candidate: Candidate) -> Table:
    """Return the parameters that a device updates, sharded over equal weights, [stages]."""
    counts: Table = np.zeros(len(candidate.stages))
    for copies, held in parameters_by_copies(candidate).items():
        counts = counts + held / (copies * candidate.data_parallel_degree)
    return counts


def parameters_by_copies(candidate: Candidate) -> Mapping[int, Table]:
    """Return the parameters a device computes with, by the number of devices that hold the same.

    The number counts devices of the sequence-parallel group; each value is [stages].
    """
    return _parameters_of_stages(
        candidate.workload,
        candidate.stages,
        is_pipeline=candidate.pipeline_parallel_degree > 1,
    )


@lru_cache(maxsize=128)
def _parameters_of_stages(
    workload: Workload, stages: tuple[range, ...], *, is_pipeline: bool
) -> Mapping[int, Table]:
    """Return the cached result of :func:`parameters_by_copies`; must not be modified."""
    everything = stage_parameters(workload.model, stages, is_pipeline=is_pipeline)
    layers = np.array([float(len(stage)) for stage in stages])
    found = {copies: layers * held for copies, held in layer_by_copies(workload).items()}
    layer = layer_parameters(workload.model)
    outer = everything - layers * layer
    for stage in np.flatnonzero(outer).tolist():
        for copies, held in outer_by_copies(workload, float(outer[stage])).items():
            found.setdefault(copies, np.zeros(len(layers)))[stage] += held
    return found


def same_weights_degree(workload: Workload) -> int:
    """Return the devices of a sequence-parallel group that hold equal weights, to shard state."""
    return workload.sequence_parallel_degree if workload.sequence_parallel == "ulysses" else 1
