"""Comparison with published figures: reasons for deviations, and the committed table."""

import json

import pytest

from experiments.harness import ROOT
from experiments.published import compare, configurations


@pytest.fixture(scope="module")
def compared():
    return [compare(published) for published in configurations()]


def test_every_deviation_has_a_reason(compared):
    assert len(compared) == 12
    for row in compared:
        ratios = [r for r in (row["time_ratio"], row["memory_ratio"]) if r is not None]
        assert all(0.4 < ratio < 1.2 for ratio in ratios), row["name"]
        if any(abs(ratio - 1) > 0.15 for ratio in ratios):
            assert row["reasons"], row["name"]
        assert sum(row["parts_s"].values()) == pytest.approx(row["predicted_s"])
        assert sum(row["memory_parts_bytes"].values()) == pytest.approx(row["predicted_bytes"])


def test_the_committed_report_is_what_the_planner_says(compared):
    committed = json.loads((ROOT / "docs/results/compare_published.json").read_text())
    assert [row["name"] for row in committed["configurations"]] == [row["name"] for row in compared]
    for then, now in zip(committed["configurations"], compared, strict=True):
        assert then["predicted_s"] == pytest.approx(now["predicted_s"], rel=0.005), now["name"]
        assert then["predicted_bytes"] == pytest.approx(now["predicted_bytes"], rel=0.005)
