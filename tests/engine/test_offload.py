"""Saved tensors offloaded whole or in part: the gradients equal those with all retained."""

import errno

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.engine.saved_rows import cut
from sppo.model.layer import Layer
from tests.engine.models import (
    HYBRID,
    VARIANTS,
    Trained,
    assert_equal_bits,
    assert_same_step,
    random_sequence,
    random_weights,
    tiny_model,
)
from tests.engine.offloading import FixedRows, RatioRows, offloading_trained
from tests.offload.disk.test_file_tier import nameless_files
from tests.offload.emulated_lane import SCHEDULERS
from tests.offload.test_block_store import failing_disk
from tests.tiers import examples

CUTS = [(0, 4, 5, 17, 30, 37), (0, 13, 20)]
ELEMENT = 8


def two_sequences(model, *, seed=0):
    return [
        random_sequence(model, 37, seed=seed),
        random_sequence(model, 20, seed=seed + 1, starts=(0, 8)),
    ]


def assert_idle(trained):
    trained.engine._stages[0].assert_idle()
    trained.engine.take_peaks()
    assert trained.engine.take_peaks().activations_bytes == 0


@st.composite
def row_splits(draw, lengths):
    """Any retained, offloaded and recomputed rows; of the input none are recomputed."""
    rows = []
    for tokens in lengths:
        parts = []
        for recomputes in (False, True, True):
            offloaded = draw(st.integers(0, tokens))
            retained = (
                draw(st.integers(0, tokens - offloaded)) if recomputes else tokens - offloaded
            )
            parts.append((retained, offloaded, tokens - offloaded - retained))
        rows.append(tuple(zip(*parts, strict=True)))
    return tuple(rows)


def test_what_is_cut_is_not_copied():
    """The store that takes it copies it, or what it needs of it."""
    saved = {"o": torch.randn(6, 8), "lse": torch.randn(4, 6)}
    o, lse = saved["o"], saved["lse"]
    parts = cut(saved, {"o": 2}, {"o": 3, "lse": 4})
    offloaded, retained = parts["offloaded"], parts["retained"]
    assert offloaded.keys() == {"o"}
    assert torch.equal(offloaded["o"], o[:2])
    assert torch.equal(retained["o"], o[2:5])
    assert torch.equal(retained["lse"], lse[:, :4])
    assert offloaded["o"].data_ptr() == o.data_ptr()
    assert retained["o"].data_ptr() == o[2:].data_ptr()
    assert retained["lse"].data_ptr() == lse.data_ptr()
    assert not saved


@settings(max_examples=examples(15, all=40))
@given(data=st.data())
def test_any_rows_give_the_gradients_of_keeping_everything(data):
    variant = data.draw(st.sampled_from(sorted(VARIANTS)))
    least = 2 if variant == HYBRID else 1
    model = tiny_model(variant, num_layers=data.draw(st.integers(least, 3)))
    length = data.draw(st.integers(1, 40))
    inner = data.draw(st.sets(st.integers(1, 39), max_size=5))
    cuts = (0, *sorted(n for n in inner if n < length), length)
    lengths = tuple(b - a for a, b in zip(cuts, cuts[1:], strict=False))
    rows = FixedRows(model, ELEMENT, data.draw(row_splits(lengths)))
    weights, sequence = random_weights(model), random_sequence(model, length, starts=(0, 3))
    offloading = offloading_trained(
        model,
        weights,
        rows,
        directory=data.draw(st.sampled_from([None, "emulated"])),
        lane=data.draw(st.sampled_from(sorted(SCHEDULERS))),
        lag=data.draw(st.integers(0, 4)),
    )
    retained = Trained(model, weights).step([sequence] * 2, [cuts] * 2)
    assert_same_step(offloading.step([sequence] * 2, [cuts] * 2), retained, tolerance=1e-10)
    assert_idle(offloading)


def test_a_layer_that_fails_with_copies_under_way_leaves_no_file(tmp_path, monkeypatch):
    model = tiny_model("gqa, q/k-norm", num_layers=4)
    weights, data = random_weights(model), two_sequences(model)
    before = nameless_files()
    for verb in ("forward", "backward"):
        for at in (2, 4 + 2, 4 * 4 + 2):
            offloading = offloading_trained(
                model, weights, RatioRows(model, ELEMENT, 0.9), directory=tmp_path
            )
            original, calls = getattr(Layer, verb), iter(range(1000))

            def failing(self, *args, original=original, calls=calls, at=at, **options):
                if next(calls) == at:
                    raise RuntimeError("layer on fire")
                return original(self, *args, **options)

            monkeypatch.setattr(Layer, verb, failing)
            with pytest.raises(RuntimeError, match="layer on fire"):
                offloading.step(data, CUTS)
            monkeypatch.setattr(Layer, verb, original)
            assert nameless_files() == before


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_disk_that_fails_ends_the_step(verb, tmp_path):
    model = tiny_model("gqa, q/k-norm")
    weights, data = random_weights(model), two_sequences(model)
    offloading = offloading_trained(
        model, weights, RatioRows(model, ELEMENT, 1.0), directory=tmp_path
    )
    expected = Trained(model, weights).step(data, CUTS)
    assert_equal_bits(offloading.step(data, CUTS), expected)
    failure = pytest.raises(OSError, match="the disk failed while (writing|reading)")
    with failing_disk(verb), failure as caught:
        offloading.step(data, CUTS)
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(RuntimeError, match="this engine is closed"):
        offloading.step(data, CUTS)


def test_what_moves_is_reported(tmp_path):
    model = tiny_model("gqa, q/k-norm")
    weights, data = random_weights(model, dtype=torch.float32), two_sequences(model)[:1]
    offloading = offloading_trained(model, weights, RatioRows(model, 4, 1.0), directory=tmp_path)
    offloading.step(data, CUTS[:1])
    copies, peaks = offloading.engine.take_copies(), offloading.engine.take_peaks()
    sizes = {"x_in": 12, "attention": 24 + 4, "linear": 24 + 12 + 2 * 6 + 2 * 18}
    tokens = 30  # all but the last seven
    assert copies.out_bytes == {c: 4 * 2 * tokens * size for c, size in sizes.items()}
    assert copies.back_bytes == copies.out_bytes
    assert copies.exposed_s >= 0
    assert copies.out_s > 0 < copies.back_s
    # The last subsequence stays, with the gradient of every subsequence's output.
    assert peaks.activations_bytes == 4 * (2 * 7 * sum(sizes.values()) + 37 * 12)
    offloading.engine.close()
