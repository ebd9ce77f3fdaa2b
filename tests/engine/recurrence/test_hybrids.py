"""Models with linear attention trained in every way: every number is that of the oracle."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest

from tests.random_training.case import Case, Leg, Shape
from tests.random_training.training import faults_of
from tests.tiers import examples

GRIDS = (
    Leg(),
    Leg(sp=2),
    Leg(pp=2, schedule="seq1f1b"),
    Leg(virtual=4, schedule="looped_bfs", kv_offloaded=(0, 1, 2), tier="host"),
    Leg(pp=2, sp=2, schedule="seq_zb_h1", policy="recompute"),
    Leg(pp=3, schedule="sppo", policy="rebuilt", tier="disk", ratio=0.4),
    Leg(pp=2, virtual=2, schedule="looped_bfs", kv_recomputed=(0, 1)),
    Leg(pp=4, sp=2, schedule="gpipe", policy="keep_attention"),
    Leg(sp=4, policy="recompute"),
    Leg(pp=2, virtual=2, schedule="interleaved_seq1f1b", policy="rebuilt", tier="host", ratio=0.7),
    Leg(dp=2, sp=2, zero=3, policy="keep_attention"),
    Leg(
        virtual=2, sp=2, schedule="looped_bfs", kv_recomputed=(0,), streams=("weights", "gradients")
    ),
    Leg(pp=2, kv_offloaded=(0, 1), tier="disk", ratio=1.0, last_too=True, policy="kept"),
)
PATTERNS = ("llfl", "flll", "lfl", "fll", "lslf")


def case_of(seed):
    """One of the grids, and all else at random, units of one to three tokens often."""
    draw, leg = random.Random(seed), GRIDS[seed % len(GRIDS)]
    if not leg.tier and not leg.kv_recomputed and leg.policy == "retain":
        leg = replace(leg, policy=draw.choice(["retain", "keep_attention", "recompute"]))
    cuts = [
        (0, *accumulate(leg.sp - 1 + draw.choice([1, 2, 3, 1, 2, 3, 9, 14]) for _ in range(units)))
        for units in draw.sample(range(1, 8), 2)
    ]
    pattern = draw.choice(PATTERNS)
    return Case(
        seed=seed,
        dtype="fp64",
        documents=draw.choice([1, 2, min(end for *_, end in cuts)]),
        model=Shape(
            family=draw.choice(["llama", "qwen3", "glm"]),
            layers=4,
            pattern=pattern,
            window=3 if "s" in pattern else None,
            gated=draw.random() < 0.5,
            experts=draw.choice(["", "", "qwen2"]),
        ),
        legs=(
            replace(
                leg,
                steps=2,
                replica_sequences=2,
                cuts=cuts[0],
                other_cuts=cuts[1],
                evaluates=True,
                debug=True,
            ),
        ),
    )


@pytest.mark.parametrize("seed", range(examples(len(GRIDS), all=200)))
def test_every_number_is_that_of_the_token_recurrence(seed):
    """On any grid: any cut, documents, policy, placement of K and V, and tier of the state."""
    assert faults_of(case_of(seed)) == []
