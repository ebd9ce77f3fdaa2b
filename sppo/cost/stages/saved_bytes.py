"""Bytes of the saved tensors of a stage: of a row of each class, and of rows that are placed."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np

from sppo.activations.placement import ActivationPlacement, Counts, saved_bytes
from sppo.activations.tensor_classes import X_IN, chosen_bytes_per_token, class_bytes_per_token
from sppo.cost.candidate import Candidate
from sppo.cost.layer_kinds import LayerKind
from sppo.schedule.costs import Table


@lru_cache(maxsize=8)
def row_bytes_of(candidate: Candidate) -> Table:
    """Return the bytes of a row of each tensor class in all layers of a stage, [stages, 3]; cached.

    Bytes are those of one device of the sequence-parallel group. Layers without backward save none.
    """
    workload = candidate.workload

    def class_bytes(kind: LayerKind) -> Table:
        sizes = class_bytes_per_token(
            workload.model, kind.type, element_bytes=workload.element_bytes
        )
        return sizes * kind.has_backward

    result = candidate.sums_over_layers(class_bytes)
    inputs = np.ceil(candidate.backward_layers / candidate.input_every)
    result[:, X_IN] = inputs * workload.hidden_row_bytes
    return result / workload.sequence_parallel_degree


def shared_input_bytes_of(candidate: Candidate) -> Table:
    """Return the bytes of a row's layer inputs that `input_every` leaves unsaved, [stages]."""
    workload = candidate.workload
    layers = candidate.backward_layers
    sharing: Table = layers - np.ceil(layers / candidate.input_every)
    return sharing * float(workload.hidden_row_bytes) / workload.sequence_parallel_degree


@lru_cache(maxsize=8)
def chosen_bytes_of(candidate: Candidate) -> Table:
    """Return the bytes of a token's chosen experts in all layers of a stage, [stages]; cached."""
    workload = candidate.workload
    found = candidate.sums_over_layers(
        lambda kind: chosen_bytes_per_token(workload.model, kind.type) * kind.has_backward
    )
    return found / workload.sequence_parallel_degree


def placed_bytes(
    placement: ActivationPlacement,
    name: Literal["retained", "offloaded"],
    *,
    candidate: Candidate,
) -> Table:
    """Return the bytes of retained or offloaded rows of each subsequence in all layers of a stage.

    The chosen experts of all tokens are retained beside the rows of the placement.

    Args:
        placement: Placement of the candidate's activations.
        name: Which rows.
        candidate: Candidate that the subsequences belong to.

    Returns:
        Bytes on one device, [stages, subsequences].
    """
    rows: Counts = getattr(placement, name)
    found = saved_bytes(
        rows,
        recomputed=placement.recomputed,
        row_bytes=row_bytes_of(candidate),
        shared_input_bytes=shared_input_bytes_of(candidate),
    )
    if name == "retained":
        found += chosen_bytes_of(candidate)[:, None] * placement.tokens
    return found
