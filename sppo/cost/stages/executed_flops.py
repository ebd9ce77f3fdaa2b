"""FLOPs that a step executes, recomputation included."""

from __future__ import annotations

import numpy as np

from sppo.activations.placement import ActivationPlacement
from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cost.candidate import Candidate
from sppo.cost.flops import (
    BACKWARD_RATIO,
    FLASH_BACKWARD_RATIO,
    causal_pairs,
    linear_flops,
    pair_flops,
    recomputed_linear_flops,
    repeated_flops,
)
from sppo.cost.linear_attention.delta_rule import repeated_rule_flops, rule_flops


def executed_flops(candidate: Candidate, placement: ActivationPlacement) -> int:
    """Return the FLOPs that a step of one replica executes if all labels count.

    Less :func:`ignored_flops` it is the numerator of ``hfu``. Recomputation counts, but not that of
    K and V.
    """
    return candidate.sequences * int(sum(flops_of_parts(candidate, placement)))


def flops_of_parts(
    candidate: Candidate, placement: ActivationPlacement
) -> tuple[float, float, float]:
    """Return the FLOPs of products, attention and linear attention's rule of one sequence.

    Their sum is that of :func:`executed_flops`.
    """
    workload, parts = candidate.workload, candidate.sample_parts
    model, lengths = workload.model, np.array(candidate.lengths, dtype=np.float64)
    spans = parts.begins.astype(np.int64), parts.ends.astype(np.int64)
    products, attention = linear_flops(model, workload.trainable) * float(lengths.sum()), 0.0
    rule = 0.0
    for stage, kinds in enumerate(candidate.kinds_of_layers):
        linear, again = (placement.recomputed[stage, :, name] for name in (LINEAR, ATTENTION))
        for kind, count in kinds.items():
            pairs = causal_pairs(*spans, window=kind.window).astype(np.float64)
            passes = 1 + kind.has_backward * (FLASH_BACKWARD_RATIO + again / lengths)
            flops = pair_flops(model, kind) * float(parts.by_subsequence(pairs) @ passes)
            attention += count * flops
            if kind.has_backward:
                products += count * recomputed_linear_flops(model, kind) * float(linear.sum())
                products += count * repeated_flops(kind) * float(lengths.sum())
            if kind.linear is not None:
                of_token = (1 + BACKWARD_RATIO * kind.has_backward) * rule_flops(kind.linear)
                of_token += repeated_rule_flops(kind.linear) * kind.has_backward
                rule += count * of_token * float(lengths.sum())
    return products - rule, attention, rule
