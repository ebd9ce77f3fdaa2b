"""The summary of a run, complete or with nothing known."""

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from sppo.report.metrics import StepMetrics
from sppo.report.run_summary import (
    Pair,
    print_summary,
    read_summary,
    run_summary,
    write_summary,
)


def _steps(count, **changes):
    values = {"grad_norm": 1.0, "lr": 1e-3, "tokens": 1000, "tokens_per_s": 500.0}
    return [
        StepMetrics(
            **(values | {"step": i, "loss": 6.0 - 0.25 * i, "step_s": 2.0 + (i == 1)} | changes)
        )
        for i in range(1, count + 1)
    ]


def _printed(summary):
    stream = io.StringIO()
    print_summary(summary, console=Console(file=stream, width=100))
    return stream.getvalue()


def test_a_whole_run(tmp_path):
    steps = _steps(12, mfu=0.4, predicted_step_s=1.6, device_peak_bytes=3 << 30)
    summary = run_summary(
        steps,
        name="stdlib",
        wall_s=75.0,
        memory_bytes={"kv_cache": Pair(1 << 30, 3 << 29), "weights": Pair(None, 1 << 20)},
        phases_s={"forward": Pair(0.5, 0.6)},
    )
    assert summary.steps == 12
    assert summary.tokens == 12_000
    assert summary.step_s == Pair(1.6, 2.0)
    assert summary.loss_first == pytest.approx(5.25)
    assert summary.loss_last == pytest.approx(3.5)
    assert summary.memory_bytes["weights"] == Pair(None, 1 << 20)
    write_summary(summary, tmp_path / "run_summary.json")
    assert read_summary(tmp_path / "run_summary.json") == summary
    stored = json.loads((tmp_path / "run_summary.json").read_text())
    assert stored["memory_bytes"]["kv_cache"] == {"predicted": 1 << 30, "measured": 3 << 29}
    assert "timeline" not in stored, "no step was run"
    assert [path.name for path in tmp_path.iterdir()] == ["run_summary.json"]

    text = _printed(summary)
    for part in ("stdlib", "5.250 → 3.500", "40.0%", "1m15s", "3.0 GiB", "1.0 GiB", "1.5 GiB"):
        assert part in text, text
    assert "1.50" in text
    assert "1.25" in text


def test_the_error_of_corrected_predictions_is_a_median(tmp_path):
    """Of the steps that were corrected, 2 s each, with the error that these had before."""
    steps = [
        *_steps(1, correction_steps=0, predicted_step_s=9.0, uncorrected_step_s=9.0),
        *_steps(1, step=2, correction_steps=1, predicted_step_s=2.1, uncorrected_step_s=1.0),
        *_steps(1, step=3, correction_steps=2, predicted_step_s=1.8, uncorrected_step_s=1.2),
        *_steps(1, step=4, correction_steps=3, predicted_step_s=2.4, uncorrected_step_s=1.4),
    ]
    steps = [replace(step, step_s=2.0) for step in steps]
    summary = run_summary(steps, name="samples", wall_s=1.0, memory_bytes={}, phases_s={})
    error = summary.prediction_error
    assert error is not None
    assert error.steps == 3
    assert (error.corrected, error.uncorrected) == pytest.approx((0.1, 0.4))
    text = _printed(summary)
    assert "error of predicted steps (median)" in text
    assert "10.0% (3 steps, 40.0% before correction)" in text
    stream = run_summary(_steps(3), name="a", wall_s=1.0, memory_bytes={}, phases_s={})
    assert stream.prediction_error is None
    assert "error of predicted" not in _printed(stream)


def test_a_run_of_which_nothing_is_known():
    summary = run_summary([], name="empty", wall_s=0.5, memory_bytes={}, phases_s={})
    assert summary.loss_last is summary.tokens_per_s is None
    text = _printed(summary)
    assert "empty" in text
    assert "Predicted" not in text


@pytest.mark.parametrize(
    ("steps", "label", "losses"),
    [(1, "step ", "5.750 → 5.750"), (3, "step ", "5.750 → 5.250"), (9, "4 steps", "5.375 → 4.125")],
)
def test_the_ends_of_a_short_run_do_not_overlap(steps, label, losses):
    summary = run_summary(_steps(steps), name="short", wall_s=1.0, memory_bytes={}, phases_s={})
    text = _printed(summary)
    assert f"first and last {label}" in text
    assert losses in text


def test_non_finite_losses_and_unknown_pairs_stay_out(tmp_path):
    steps = [*_steps(2), *_steps(1, step=3, loss=math.nan, skipped=True)]
    summary = run_summary(
        steps,
        name="[bold]odd[/bold]",
        wall_s=1.0,
        memory_bytes={"activations": Pair(None, None)},
        phases_s={"backward": Pair(math.nan, 0.0)},
    )
    assert (summary.loss_first, summary.loss_last) == (5.75, 5.5)
    assert summary.skipped_steps == 1
    assert summary.phases_s["backward"] == Pair(None, 0.0)
    write_summary(summary, tmp_path / "run_summary.json")
    text = _printed(summary)
    assert "3 (1 skipped)" in text
    assert "[bold]odd[/bold]" in text
