"""Published distributions of lengths: their shares, and repeatable draws."""

import numpy as np
import pytest

from sppo.data.samples.length_distributions import DISTRIBUTIONS, draw

KI = 1024
MANY = 1_000_000


def lengths(name, **options):
    return np.array(draw(name, MANY, seed=1, **options))


def test_documents_of_the_histogram_of_many():
    found = lengths("magi")
    up_to = {10: 0.22, 100: 8.33, 1 * KI: 71.39, 8 * KI: 97.43, 64 * KI: 99.71, 192 * KI: 100.02}
    for edge, percent in up_to.items():
        assert (found <= edge).mean() == pytest.approx(percent / 100.02, abs=0.002), edge


def test_github_has_the_published_shares():
    found = lengths("github")
    assert (found <= 8 * KI).mean() == pytest.approx(0.915, abs=0.002)
    assert (found > 64 * KI).mean() == pytest.approx(0.006, abs=0.0005)
    assert found[found > 64 * KI].sum() / found.sum() == pytest.approx(0.216, abs=0.01)
    assert found[found > 128 * KI].sum() / found.sum() == pytest.approx(0.162, abs=0.01)


def test_the_others_have_the_published_shares():
    """Of commoncrawl, and medians within the clamps of the lognormals of their means."""
    assert (lengths("commoncrawl") <= 2 * KI).mean() == pytest.approx(0.7, abs=0.002)
    for mean, sigma in ((1024, 1.5), (768, 1.8)):
        found = lengths(f"lognormal-{mean}")
        assert (found.min(), found.max()) == (128, 8192)
        median = mean * np.exp(-(sigma**2) / 2)
        assert np.median(found) == pytest.approx(median, rel=0.01)
        assert np.quantile(found, 0.8413447) == pytest.approx(median * np.exp(sigma), rel=0.02)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_repeat_and_differ_by_seed(name):
    first = draw(name, 500, seed=3, scale=0.25, longest=4096)
    assert first == draw(name, 500, seed=3, scale=0.25, longest=4096)
    assert first != draw(name, 500, seed=4, scale=0.25, longest=4096)
    assert first[:100] == draw(name, 100, seed=3, scale=0.25, longest=4096)
    assert DISTRIBUTIONS[name].source.endswith(".")


def test_a_draw_is_the_same_on_every_machine():
    assert draw("magi", 8, seed=0) == (819, 263, 57, 22, 1591, 3060, 750, 1098)


def test_lengths_are_scaled_then_cut():
    whole = np.array(draw("github", 10_000, seed=5))
    scaled = np.array(draw("github", 10_000, seed=5, scale=1 / 64))
    cut = np.array(draw("github", 10_000, seed=5, scale=1 / 64, longest=300))
    assert np.abs(scaled - whole / 64).max() <= 1
    assert scaled.min() >= 1
    assert (cut == np.minimum(scaled, 300)).all()
