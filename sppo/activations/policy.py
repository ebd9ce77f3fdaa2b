"""Activation policies: which saved tensors are retained, offloaded or recomputed.

A policy decides for each (stage, subsequence, class of :mod:`sppo.activations.tensor_classes`) how
many rows, i.e. tokens, are retained on the device, offloaded to the next tier, and recomputed. At
most one class of a subsequence is cut, at a multiple of 128 rows.

- ``retain``, ``keep_attention``, ``recompute`` offload nothing: they retain all three classes, the
  first two, or the first, and recompute the other classes.
- ``offload_all`` offloads all three classes.
- ``sppo`` (SPPO paper, section 5.2) offloads as many bytes as can be copied during the next
  subsequence's forward, alpha_i A_i = bandwidth * T_(i+1), and retains the rest; the last
  subsequence is retained whole.
- ``hybrid`` retains what fits, offloads of the rest what can be copied during compute, and for the
  remainder either recomputes or waits for the copy, whichever is cheaper
  (:mod:`sppo.activations.hybrid`). If everything fits, the placement is that of ``retain``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from sppo.activations.placement import ActivationPlacement, prefix_rows
from sppo.activations.policy_inputs import PolicyInputs
from sppo.activations.subsequence_placement import PlacementOf, SubsequencePlacement
from sppo.activations.tensor_classes import (
    ATTENTION,
    CHOSEN,
    CLASSES,
    LINEAR,
    X_IN,
    tensor_bytes_per_token,
    tensors_of,
)
from sppo.config.model import LayerType, ModelConfig
from sppo.schedule.costs import Table

POLICIES: Mapping[str, tuple[int, ...]] = {
    "retain": (X_IN, ATTENTION, LINEAR),
    "keep_attention": (X_IN, ATTENTION),
    "recompute": (X_IN,),
}
"""Classes retained by each policy that offloads nothing, in order of decreasing memory."""
OFFLOADING_POLICIES = ("offload_all", "sppo", "hybrid")
"""Policies that use another tier, or a memory budget."""


def saved_tensors(policy: str, model: ModelConfig, layer_type: LayerType) -> frozenset[str]:
    """Return the names of the tensors that a layer saves by a policy that offloads nothing.

    Raises:
        ValueError: A policy that is not in :data:`POLICIES`.
    """
    chosen = {CHOSEN} if layer_type.routed else frozenset()
    return tensors_of(classes_retained(policy), model, layer_type) | chosen


def classes_retained(policy: str) -> tuple[int, ...]:
    """Return the classes retained by a policy that offloads nothing; others are recomputed.

    Raises:
        ValueError: A policy that is not in :data:`POLICIES`.
    """
    if policy not in POLICIES:
        raise ValueError(f"activation policy {policy!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[policy]


def policy_placement(policy: str) -> PlacementOf:
    """Return the placement of a policy that offloads nothing, for any stage and any lengths.

    Raises:
        ValueError: A policy that is not in :data:`POLICIES`.
    """
    saved = classes_retained(policy)

    def placed(tokens: int) -> SubsequencePlacement:
        x_in, attention, linear = (tokens * (index in saved) for index in range(len(CLASSES)))
        recomputed = tokens - x_in, tokens - attention, tokens - linear
        return SubsequencePlacement((x_in, attention, linear), (0, 0, 0), recomputed)

    return lambda lengths: tuple(map(placed, lengths))


def saved_bytes_per_token(
    policy: str, model: ModelConfig, *, layers: range, element_bytes: int
) -> int:
    """Return the bytes per token that layers save by a policy without offload, excluding K/V."""
    found = 0
    for layer_type, count in Counter(map(model.layer_type, layers)).items():
        sizes = tensor_bytes_per_token(model, layer_type, element_bytes=element_bytes)
        found += count * sum(sizes[name] for name in saved_tensors(policy, model, layer_type))
    return found


def decide(policy: str, inputs: PolicyInputs) -> ActivationPlacement:
    """Return the placement of every class of every subsequence on every stage by a policy.

    The placement may need more memory than the device has. Callers must check the memory of the
    placement (:func:`sppo.cost.memory.copy_room.with_placement`). The hybrid policy compares
    several placements: see :func:`sppo.activations.hybrid.choices`.

    Raises:
        ValueError: An unknown policy, or a policy that offloads on a machine without another tier.
    """
    if policy in POLICIES:
        return _whole(inputs, retained=POLICIES[policy])
    if policy not in OFFLOADING_POLICIES:
        raise ValueError(
            f"activation policy {policy!r} is not one of "
            f"{', '.join((*POLICIES, *OFFLOADING_POLICIES))}"
        )
    _check_tier(inputs, f"activations.policy {policy!r}")
    if policy == "offload_all":
        return _whole(inputs, offloaded=(X_IN, ATTENTION, LINEAR))
    return _offloaded_bytes(inputs, inputs.copied_bytes(0.0))


def decide_ratio(inputs: PolicyInputs, *, ratio: float) -> ActivationPlacement:
    """Return the placement that offloads the same fraction of the bytes of every subsequence.

    The last subsequence of each sequence is retained whole.

    Raises:
        ValueError: A machine without another tier.
    """
    if ratio > 0:
        _check_tier(inputs, f"activations.offload_ratio {ratio:g}")
    wanted = inputs.class_bytes.sum(axis=2) * ratio
    wanted[:, list(inputs.lasts)] = 0.0
    return _offloaded_bytes(inputs, wanted)


def _check_tier(inputs: PolicyInputs, asked: str) -> None:
    if inputs.copy_bytes_per_s <= 0:
        raise ValueError(
            f"{asked} offloads activations, and this machine has no tier to offload to: name a "
            "disk directory (activations.disk) and close it by neither activations.tier=device nor "
            "activations.disk_memory=0, or write activations.policy=hybrid"
        )


def _whole(
    inputs: PolicyInputs, *, offloaded: tuple[int, ...] = (), retained: tuple[int, ...] = ()
) -> ActivationPlacement:
    """Return the placement of whole classes, equal on every stage; other classes are recomputed.

    A stage that saves nothing, since it has no backward, counts as retaining everything.
    """
    shape = len(inputs.row_bytes), len(inputs.tokens), len(CLASSES)
    tables = np.zeros((3, *shape), dtype=np.int64)
    saves = inputs.row_bytes.any(axis=1)
    tables[0, ~saves] = inputs.tokens[:, None]
    for index in range(len(CLASSES)):
        fate = 0 if index in retained else 1 if index in offloaded else 2
        tables[fate, saves, :, index] = inputs.tokens
    return ActivationPlacement(*tables)


def _offloaded_bytes(inputs: PolicyInputs, wanted: Table) -> ActivationPlacement:
    """Offload ``wanted`` bytes of each subsequence, most valuable class first; retain the rest."""
    everything = _whole(inputs, retained=(X_IN, ATTENTION, LINEAR))
    offloaded = prefix_rows(
        wanted,
        rows=everything.retained,
        row_bytes=inputs.row_bytes[:, None],
        allow_partial=inputs.allow_partial,
    )
    return ActivationPlacement(everything.retained - offloaded, offloaded, everything.recomputed)
