"""Placements of K and V that a candidate may have, and checks of candidates that cannot work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sppo.activations.placement import ActivationPlacement
from sppo.activations.tensor_classes import X_IN
from sppo.cost.candidate import Candidate, of_ranks
from sppo.cost.kv import kv_tier_bytes
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.stage_cost import copy_bytes_per_s, row_bytes_of
from sppo.planning.search.policy_inputs import tier_room_bytes
from sppo.schedule.transfers.copies import KVPlacement


def kv_choices(candidate: Candidate) -> tuple[KVPlacement, ...]:
    """Return the placements of K and V that a candidate may have, simplest first."""
    found: list[KVPlacement] = ["retained"]
    if copy_bytes_per_s(candidate)[0] > 0:
        found.append("offloaded")
    moves_inputs = candidate.policy in ("offload_all", "sppo") or candidate.offload_ratio
    if candidate.input_every == 1 and not moves_inputs:
        found.append("recomputed")
    return tuple(found)


def kv_mixes(candidate: Candidate, states: tuple[StageMemory, ...]) -> tuple[Candidate, ...]:
    """Return the candidate with K and V recomputed on some stages per rank, offloaded on others.

    For use if no uniform placement fits: stages that recompute keep their inputs on the device, and
    the tier holds inputs, K and V of as many other stages as there is room for.

    Args:
        candidate: Candidate that leaves the placement of K and V open.
        states: Memory of each rank without saved activations.
    """
    turns, out = candidate.virtual_stages, copy_bytes_per_s(candidate)[0]
    is_free = candidate.policy == "hybrid" and candidate.offload_ratio is None
    if not (is_free and out and turns > 2) or candidate.input_every > 1 or candidate.packed:
        return ()
    room = tier_room_bytes(candidate, states)
    inputs = row_bytes_of(candidate)[:, X_IN] * sum(candidate.lengths)
    whole = inputs + kv_tier_bytes(replace(candidate, kv="offloaded")).max()
    for count in range(1, turns - 1):
        mixed = replace(candidate, kv="offloaded", kv_recomputed=count)
        stays = [kv == "recomputed" for kv in mixed.kv_of_stages]
        behind = np.where(stays, 0.0, whole * mixed.sequences)
        if (of_ranks(mixed, behind) <= room).all():
            counts = (number for number in (count, count + 1) if number < turns - 1)
            return tuple(replace(mixed, kv_recomputed=number) for number in counts)
    return ()


def check_kv(candidate: Candidate) -> None:
    """Raise ValueError if K and V of a candidate cannot be placed as asked.

    Raises:
        ValueError: There is no tier to offload K and V to, or not every layer's input is saved to
            recompute K and V from.
    """
    if candidate.kv == "offloaded" and not copy_bytes_per_s(candidate)[0]:
        raise ValueError(
            "activations.kv=offload, and there is no tier to offload K and V to: leave "
            "activations.tier out, name a directory (activations.disk=DIR) on a CPU, or write "
            "activations.kv=recompute or auto"
        )
    recomputes = candidate.kv == "recomputed" or candidate.kv_recomputed > 0
    if recomputes and candidate.input_every > 1:
        raise ValueError(
            f"activations.kv=recompute with activations.input_every={candidate.input_every}: K and "
            "V are recomputed from every layer's input; write activations.input_every=1, or "
            "another activations.kv"
        )


def check_inputs_retained(candidate: Candidate, placement: ActivationPlacement) -> None:
    """Raise ValueError if K and V are to be recomputed from layer inputs that are offloaded.

    Raises:
        ValueError: The policy offloads inputs of stages that recompute K and V.
    """
    recomputes = [kv == "recomputed" for kv in candidate.kv_of_stages]
    if placement.offloaded[recomputes, :, X_IN].any():
        raise ValueError(
            f"activations.kv=recompute with activations.policy={candidate.policy}, which offloads "
            "the layers' inputs, from which K and V are recomputed: write activations.policy=auto, "
            "keep_attention or recompute, or activations.kv=offload"
        )
