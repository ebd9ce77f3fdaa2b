"""Layers with a sliding window: which keys, values and gradients of them are kept."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sppo.engine.pipeline import Pipeline
from tests.engine.models import (
    VARIANTS,
    Trained,
    assert_equal_bits,
    assert_same_step,
    autograd_step,
    random_sequence,
    random_weights,
    tiny_model,
)

CUTS = (0, 5, 6, 13, 20, 24)
AGAIN = Pipeline(recomputes_windows=True)


def windowed(window, **fields):
    """Three layers of which two have a window, with one head size for K and for V."""
    return tiny_model(
        "gqa, q/k-norm",
        num_layers=3,
        sliding_window=window,
        layer_types=["sliding", "full", "sliding"],
        **fields,
    )


def step(model, *, pipeline=AGAIN, policy="retain", starts=(0,), cuts=CUTS):
    trained = Trained(model, random_weights(model), pipeline=pipeline, policy=policy)
    sequences = [random_sequence(model, cuts[-1], seed=seed, starts=starts) for seed in (0, 1)]
    found = trained.step(sequences, [cuts] * 2)
    return found, sequences, trained.engine


# One key, shorter than a unit, one unit, over several units, all keys before, more than there are.
@pytest.mark.parametrize("window", [1, 2, 5, 8, 9, 24, 25, 40])
@pytest.mark.parametrize("policy", ["retain", "recompute"])
def test_recomputed_keys_are_those_of_forward(window, policy):
    model = windowed(window)
    again, sequences, _ = step(model, policy=policy, starts=(0, 3, 7, 19))
    kept, _, _ = step(model, policy=policy, starts=(0, 3, 7, 19), pipeline=Pipeline())
    assert_equal_bits(again, kept)
    expected = autograd_step(model, random_weights(model), sequences)
    assert_same_step(again, expected, tolerance=1e-10)


@pytest.mark.parametrize("variant", ["mqa, window, biases", "window from layer 1, llama3"])
def test_layers_between_saved_inputs_recompute_their_keys(variant):
    model = tiny_model(variant, num_layers=4)
    pipeline = Pipeline(recomputes_windows=True, input_every=3)
    again, sequences, _ = step(model, policy="keep_attention", pipeline=pipeline)
    expected = autograd_step(model, random_weights(model), sequences)
    assert_same_step(again, expected, tolerance=1e-10)
    assert variant in VARIANTS


@pytest.mark.parametrize("window", [1, 4, 9, 40])
def test_rows_that_later_units_see_are_kept(window):
    """Of K and V those of each unit, of gradients those before the last unit."""
    model = windowed(window)
    row_bytes = 2 * model.kv_heads * model.head_dim * 8
    seen = sum(min(end - start, window - 1) for start, end in pairwise(CUTS[:-1]))
    before_last = min(CUTS[-2], window - 1)
    for pipeline, rows in ((AGAIN, seen), (Pipeline(), CUTS[-1])):
        _, _, engine = step(model, pipeline=pipeline)
        of_windows = 2 * (rows + before_last)
        assert engine.take_peaks().kv_bytes == (2 * CUTS[-1] + of_windows) * row_bytes
        engine.evaluate(random_sequence(model, CUTS[-1]), CUTS)
        assert engine.take_peaks().kv_bytes == (CUTS[-1] + 2 * seen) * row_bytes
