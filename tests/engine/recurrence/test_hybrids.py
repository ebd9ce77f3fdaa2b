"""Models with linear attention trained in every way: every number is that of the oracle."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest

from sppo.engine.pipeline import ALONE, Pipeline
from tests.engine.models import (
    HYBRID,
    Trained,
    assert_equal_bits,
    random_sequence,
    random_weights,
    tiny_model,
)
from tests.engine.offloading import RatioRows, offloading_trained
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
    Leg(sp=2, tier="host", ratio=0.6, last_too=True, policy="rebuilt"),
)
CUTS = (0, 8, 9, 16, 24)
PATTERNS = ("llfl", "flll", "lfl", "fll", "lslf")


def case_of(seed):
    """One of the grids, often another one after it, and all else at random."""
    draw = random.Random(seed)
    others = draw.sample(GRIDS, draw.choice([0, 0, 1]))
    legs = [_leg(draw, leg) for leg in (GRIDS[seed % len(GRIDS)], *others)]
    shortest = min(leg_cuts[-1] for leg in legs for leg_cuts in (leg.cuts, leg.other_cuts))
    pattern = draw.choice(PATTERNS)
    return Case(
        seed=seed,
        dtype="fp64",
        documents=draw.choice([1, 2, shortest]),
        model=Shape(
            family=draw.choice(["llama", "qwen3", "glm"]),
            layers=4,
            pattern=pattern,
            window=3 if "s" in pattern else None,
            gated=draw.random() < 0.5,
            experts=draw.choice(["", "", "qwen2"]),
        ),
        legs=tuple(legs),
    )


def _leg(draw, leg):
    """Steps of two sequences, which are cut differently, units of one to three tokens often."""
    if not leg.tier and not leg.kv_recomputed and leg.policy == "retain":
        leg = replace(leg, policy=draw.choice(["retain", "keep_attention", "recompute"]))
    cuts, other_cuts = (
        (0, *accumulate(leg.sp - 1 + draw.choice([1, 2, 3, 1, 2, 3, 9]) for _ in range(units)))
        for units in draw.sample(range(1, 7), 2)
    )
    return replace(
        leg,
        steps=2,
        replica_sequences=2 // leg.dp,
        cuts=cuts,
        other_cuts=other_cuts,
        zero=leg.zero if leg.zero > 1 else draw.choice([0, 1, 2, 3]),
        evaluates=True,
        debug=True,
    )


@pytest.mark.parametrize("seed", range(examples(len(GRIDS), all=200)))
def test_every_number_is_that_of_the_token_recurrence(seed):
    """With any cut, documents, grid, policy, placement of K and V, and tier of the state."""
    assert faults_of(case_of(seed)) == []


@pytest.mark.parametrize("pipeline", [ALONE, Pipeline("looped_bfs", num_virtual=4)], ids=str)
def test_what_moves_comes_back_as_it_was(pipeline, tmp_path):
    model = tiny_model(HYBRID, num_layers=4)
    weights, data = random_weights(model), random_sequence(model, 24, starts=(0, 5, 11))
    kept = Trained(model, weights, pipeline=pipeline).step([data], [CUTS])
    away = replace(pipeline, kv_offloaded=range(pipeline.num_virtual - 1))
    rows = RatioRows(model, 8, 0.6, last_too=True)
    moving = offloading_trained(model, weights, rows, directory=tmp_path, pipeline=away)
    assert_equal_bits(moving.step([data], [CUTS]), kept)
    copied = moving.engine.take_copies().out_bytes
    one_layer = 2 * 24 * model.kv_heads * model.head_dim * 8
    assert copied["linear"]
    assert copied.get("kv", 0) == (one_layer if pipeline.num_virtual > 1 else 0)


def test_a_step_that_fails_leaves_no_state():
    model = tiny_model(HYBRID)
    trained = Trained(model, random_weights(model))

    def fail(position, _):
        if position == 4:
            raise RuntimeError("layer on fire")

    with pytest.raises(RuntimeError, match="layer on fire"):
        trained.step([random_sequence(model, 24)], [CUTS], before_action=fail)
    assert trained.engine._states.num_sequences == 0
