"""Placements of K and V that a candidate may have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from sppo.activations.tensor_classes import X_IN
from sppo.cost.candidate import Candidate, of_ranks
from sppo.cost.kv import kv_tier_bytes
from sppo.cost.memory.state_memory import state_memory
from sppo.cost.stages.links import copy_bytes_per_s
from sppo.cost.stages.saved_bytes import row_bytes_of
from sppo.planning.search.policy_inputs import tier_room_bytes


def kv_choices(candidate: Candidate) -> Iterator[Candidate]:
    """Yield a candidate with each placement of K and V that it may have, simplest first.

    Retaining is simplest, then offloading, then the same with K and V recomputed in layers with a
    sliding window, then recomputing on all stages, and on some stages alone.
    """
    if candidate.windowed_kv is not None:
        yield from _of_stages(candidate)
        return
    of_stages = [*_of_stages(candidate)]
    for choice in of_stages:
        if "recomputed" not in choice.kv_of_stages:
            yield replace(choice, windowed_kv="retained")
    for choice in of_stages:
        yield replace(choice, windowed_kv="recomputed")


def _of_stages(candidate: Candidate) -> Iterator[Candidate]:
    """Yield a candidate with each placement of the K and V of its stages, simplest first."""
    if candidate.kv is not None:
        yield candidate
        return
    yield replace(candidate, kv="retained")
    if copy_bytes_per_s(candidate)[0] > 0:
        yield replace(candidate, kv="offloaded")
    if candidate.input_every == 1 and not _moves_inputs(candidate):
        yield replace(candidate, kv="recomputed")
        yield from _mixes(candidate)


def _mixes(candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with K and V recomputed on some stages per rank, offloaded on others.

    Stages that recompute keep their inputs on the device, and the tier holds inputs, K and V of as
    many other stages as there is room for.
    """
    turns, is_free = candidate.virtual_stages, candidate.policy == "hybrid"
    if not (is_free and copy_bytes_per_s(candidate)[0] and turns > 2) or candidate.packed:
        return
    offloaded = replace(candidate, kv="offloaded")
    room = tier_room_bytes(offloaded, state_memory(offloaded))
    inputs = row_bytes_of(candidate)[:, X_IN] * sum(candidate.lengths)
    whole = inputs + kv_tier_bytes(offloaded).max()
    for count in range(1, turns - 1):
        mixed = replace(offloaded, kv_recomputed=count)
        stays = [kv == "recomputed" for kv in mixed.kv_of_stages]
        behind = np.where(stays, 0.0, whole * mixed.sequences)
        if (of_ranks(mixed, behind) <= room).all():
            more = range(count, min(count + 2, turns - 1))
            yield from (replace(mixed, kv_recomputed=number) for number in more)
            return


def check_kv(candidate: Candidate) -> None:
    """Raise ValueError if K and V of a candidate cannot be placed as asked.

    Raises:
        ValueError: There is no tier to offload K and V to; or not every layer's input is saved to
            recompute K and V from, or the policy offloads it.
    """
    if candidate.kv == "offloaded" and not copy_bytes_per_s(candidate)[0]:
        raise ValueError(
            "activations.kv=offload, and there is no tier to offload K and V to: leave "
            "activations.tier out, name a directory (activations.disk=DIR) on a CPU, or write "
            "activations.kv=recompute or auto"
        )
    if "recomputed" not in candidate.kv_of_stages:
        return
    if candidate.input_every > 1:
        raise ValueError(
            f"activations.kv=recompute with activations.input_every={candidate.input_every}: K and "
            "V are recomputed from every layer's input; write activations.input_every=1, or "
            "another activations.kv"
        )
    if _moves_inputs(candidate):
        raise ValueError(
            f"activations.kv=recompute with activations.policy={candidate.policy}, which offloads "
            "the layers' inputs, from which K and V are recomputed: write activations.policy=auto, "
            "keep_attention or recompute, or activations.kv=offload"
        )


def _moves_inputs(candidate: Candidate) -> bool:
    """Return whether inputs of layers may be offloaded whatever else is chosen."""
    return candidate.policy in ("offload_all", "sppo") or bool(candidate.offload_ratio)
