"""The choices a run file leaves to ``auto``, made before anything is built."""

from __future__ import annotations

from dataclasses import dataclass

from sppo.config.run import RunConfig
from sppo.planning.activation_policy import POLICIES
from sppo.planning.flops import partition_costs
from sppo.planning.memory import MemoryBuckets, memory_of_rank
from sppo.planning.partition import (
    automatic_pieces,
    boundaries_by_flops,
    boundaries_by_length,
    lengths_of,
)
from sppo.units import MIB, format_bytes

ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
TARGET_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens of a subsequence for ``num_subsequences: auto``. On a CPU 1Ki and 2Ki
took the same time; the larger makes fewer. On a GPU, not measured: the middle of the paper's 2K to
16K."""
LOGITS_TILE_BYTES = 16 * MIB
_USABLE_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Resolved:
    """What one rank will do."""

    boundaries: tuple[int, ...]
    """Cuts of a sequence, from 0 to its length."""
    policy: str
    """Activation policy."""
    memory: MemoryBuckets
    """Predicted peak."""


def resolve(run: RunConfig, *, available_bytes: int, device: str = "cpu") -> Resolved:
    """Cut the sequence and choose the activation policy.

    Args:
        run: checked.
        available_bytes: memory the run may use.
        device: ``cpu`` or ``cuda``.

    Raises:
        MemoryError: a policy left to ``auto``, and none fits.
    """
    boundaries = sequence_boundaries(run, device=device)
    longest = max(lengths_of(boundaries))

    def memory(policy: str) -> MemoryBuckets:
        return memory_of_rank(
            run.model,
            length=run.sequence.length,
            longest=longest,
            policy=policy,
            element_bytes=ELEMENT_BYTES[run.train.dtype],
            tile_bytes=LOGITS_TILE_BYTES,
        )

    if run.activations.policy != "auto":
        return Resolved(boundaries, run.activations.policy, memory(run.activations.policy))
    budget = int(available_bytes * _USABLE_SHARE)
    for policy in POLICIES:
        predicted = memory(policy)
        if predicted.total_bytes <= budget:
            return Resolved(boundaries, policy, predicted)
    least = memory(POLICIES[-1])
    raise MemoryError(
        f"a sequence of {run.sequence.length} tokens needs {format_bytes(least.total_bytes)} even "
        f"with activations.policy=recompute, and {format_bytes(budget)} may be used of "
        f"{format_bytes(available_bytes)}; shorten sequence.length or take a smaller model"
    )


def sequence_boundaries(run: RunConfig, *, device: str = "cpu") -> tuple[int, ...]:
    """Cuts of a training sequence as the run file asks."""
    sequence = run.sequence
    if sequence.boundaries is not None:
        return sequence.boundaries
    pieces = (
        automatic_pieces(sequence.length, target_tokens=TARGET_TOKENS[device])
        if sequence.num_subsequences == "auto"
        else sequence.num_subsequences
    )
    if sequence.partition == "length":
        return boundaries_by_length(sequence.length, pieces=pieces, alignment=sequence.alignment)
    linear, quadratic = partition_costs(run.model)
    return boundaries_by_flops(
        sequence.length,
        pieces=pieces,
        linear=linear,
        quadratic=quadratic,
        alignment=sequence.alignment,
    )
