"""What happens to every saved tensor between forward and backward: kept, moved, or rebuilt.

A policy decides for each (stage, subsequence, class of :mod:`sppo.activations.tensor_classes`) how
many rows, i.e. tokens, are kept on the device, moved to the next tier, and rebuilt. At most one
class of a subsequence is cut, at a multiple of 128 rows.

- ``retain``, ``keep_attention``, ``recompute`` move nothing: they keep all three classes, the
  first two, or the first.
- ``offload_all`` moves everything.
- ``sppo`` (SPPO paper, section 5.2) moves what hides behind a subsequence's forward,
  alpha_i A_i = bandwidth * T_c, keeps the rest, and keeps the last subsequence whole.
- ``hybrid`` keeps what fits, moves what hides of the rest, and rebuilds what neither fits nor
  hides, or waits for its copy where that is cheaper (:mod:`sppo.activations.hybrid`). When
  everything fits it is ``retain``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sppo.activations.hybrid import choices
from sppo.activations.placement import ActivationPlacement, PolicyInputs, prefix_rows
from sppo.activations.subsequence_placement import PlacementOf, SubsequencePlacement
from sppo.activations.tensor_classes import (
    ATTENTION,
    CLASSES,
    LINEAR,
    X_IN,
    tensor_bytes_per_token,
    tensors_of,
)
from sppo.config.model import ModelConfig
from sppo.schedule.costs import Table

POLICIES = ("retain", "keep_attention", "recompute")
"""Policies that move nothing, from most memory to least."""
OFFLOADING_POLICIES = ("offload_all", "sppo", "hybrid")
"""Policies that need another tier, or a memory budget."""

_RETAINED: Mapping[str, tuple[int, ...]] = {
    "retain": (X_IN, ATTENTION, LINEAR),
    "keep_attention": (X_IN, ATTENTION),
    "recompute": (X_IN,),
}


def saved_tensors(policy: str, model: ModelConfig) -> frozenset[str]:
    """Names kept between forward and backward by a policy that moves nothing.

    Raises:
        ValueError: not one of :data:`POLICIES`.
    """
    return tensors_of(classes_retained(policy), model)


def classes_retained(policy: str) -> tuple[int, ...]:
    """Classes kept by a policy that moves nothing; it rebuilds the others.

    Raises:
        ValueError: not one of :data:`POLICIES`.
    """
    if policy not in POLICIES:
        raise ValueError(f"activation policy {policy!r} is not one of {', '.join(POLICIES)}")
    return _RETAINED[policy]


def policy_placement(policy: str) -> PlacementOf:
    """What a policy that moves nothing does on every stage, for sequences however they are cut.

    Raises:
        ValueError: not one of :data:`POLICIES`.
    """
    saved = classes_retained(policy)
    x_in, attention, linear = (int(index in saved) for index in range(len(CLASSES)))

    def placement_of(lengths: tuple[int, ...]) -> tuple[SubsequencePlacement, ...]:
        return tuple(
            SubsequencePlacement(
                retained=(n * x_in, n * attention, n * linear),
                offloaded=(0, 0, 0),
                recomputed=(n - n * x_in, n - n * attention, n - n * linear),
            )
            for n in lengths
        )

    return placement_of


def saved_bytes_per_token(policy: str, model: ModelConfig, *, element_bytes: int) -> int:
    """Bytes per token and layer that a policy without copies keeps, K/V not included."""
    sizes = tensor_bytes_per_token(model, element_bytes=element_bytes)
    return sum(sizes[name] for name in saved_tensors(policy, model))


def decide(policy: str, situation: PolicyInputs) -> ActivationPlacement:
    """What ``policy`` does to every class of every subsequence on every stage.

    The result may need more room than there is: only ``hybrid`` looks at the room, and it too
    keeps what it finds no other place for. Whoever asks compares with
    :func:`sppo.activations.placement.held_bytes`.

    Raises:
        ValueError: an unknown policy, or one that moves where there is no other tier.
    """
    if policy in POLICIES:
        return _whole(situation, offloaded=(), retained=_RETAINED[policy])
    if policy not in OFFLOADING_POLICIES:
        raise ValueError(
            f"activation policy {policy!r} is not one of "
            f"{', '.join((*POLICIES, *OFFLOADING_POLICIES))}"
        )
    if policy == "hybrid":
        return min(choices(situation), key=lambda choice: seconds_added(choice, situation))
    _check_tier(situation, f"activations.policy {policy!r}")
    if policy == "offload_all":
        return _whole(situation, offloaded=(X_IN, ATTENTION, LINEAR), retained=())
    return _offloaded_bytes(situation, _hideable(situation))


def decide_ratio(situation: PolicyInputs, *, ratio: float) -> ActivationPlacement:
    """Every subsequence but the last of a sequence sends away the same share of its bytes.

    Raises:
        ValueError: there is no other tier.
    """
    if ratio > 0:
        _check_tier(situation, f"activations.offload_ratio {ratio:g}")
    wanted = situation.class_bytes.sum(axis=2) * ratio
    wanted[:, -1] = 0.0
    return _offloaded_bytes(situation, wanted)


def _check_tier(situation: PolicyInputs, asked: str) -> None:
    if situation.copy_bytes_per_s <= 0:
        raise ValueError(
            f"{asked} moves activations, and this machine has no tier to move them to: name a disk "
            "directory (activations.disk) and close it by neither activations.tier=device nor "
            "activations.disk_memory=0, or write activations.policy=hybrid"
        )


def _whole(
    situation: PolicyInputs, *, offloaded: tuple[int, ...], retained: tuple[int, ...]
) -> ActivationPlacement:
    """Whole classes, the same on every stage; what is neither kept nor moved is rebuilt."""
    shape = (len(situation.row_bytes), len(situation.tokens), len(CLASSES))
    rows = np.broadcast_to(situation.tokens[None, :, None], shape)
    fates = [1 if index in offloaded else 0 if index in retained else 2 for index in range(3)]
    tables = np.zeros((3, *shape), dtype=np.int64)
    for index, fate in enumerate(fates):
        tables[fate, :, :, index] = rows[:, :, index]
    return ActivationPlacement(*tables)


def _hideable(situation: PolicyInputs) -> Table:
    """Bytes each subsequence moves behind its own time, none of the last one's."""
    wanted: Table = np.minimum(situation.hidden_bytes, situation.class_bytes.sum(axis=2))
    wanted[:, -1] = 0.0
    return wanted


def _offloaded_bytes(situation: PolicyInputs, wanted: Table) -> ActivationPlacement:
    """Move ``wanted`` bytes of each subsequence, the most valuable class first; keep the rest."""
    everything = _whole(situation, offloaded=(), retained=(X_IN, ATTENTION, LINEAR))
    offloaded = prefix_rows(
        wanted,
        tokens=situation.tokens,
        row_bytes=situation.row_bytes,
        allow_partial=situation.allow_partial,
    )
    return ActivationPlacement(everything.retained - offloaded, offloaded, everything.recomputed)


def seconds_added(decisions: ActivationPlacement, situation: PolicyInputs) -> float:
    """What rebuilding and waiting for copies adds on the stage with most of it."""
    shares = decisions.recomputed / situation.tokens[:, None]
    recomputed = shares[:, :, LINEAR] * situation.linear_recompute_s
    recomputed = recomputed + shares[:, :, ATTENTION] * situation.attention_recompute_s
    offloaded = (decisions.offloaded * situation.row_bytes[:, None, :]).sum(axis=2)
    waited = np.maximum(0.0, offloaded - situation.hidden_bytes)
    if situation.copy_bytes_per_s > 0:
        recomputed = recomputed + waited / situation.copy_bytes_per_s
    return float(recomputed.sum(axis=1).max())
