"""Metrics: the file and the line."""

import json
import math
from dataclasses import asdict

import pytest

from sppo.report.metrics import JsonlSink, StepMetrics, read_metrics
from sppo.report.step_line import step_line
from tests.test_output_file import file_size_limit

REQUIRED = {
    *("step", "loss", "grad_norm", "lr", "tokens", "step_s", "predicted_step_s", "tokens_per_s"),
    *("mfu", "hfu", "device_peak_bytes", "host_peak_bytes", "offloaded_bytes"),
    *("exposed_copy_s", "skipped"),
}


def _metrics(step=1, **changes):
    values = {
        "step": step,
        "loss": 2.431,
        "grad_norm": 0.7,
        "lr": 3e-4,
        "tokens": 16384,
        "step_s": 25.4,
        "tokens_per_s": 41_234.0,
    }
    return StepMetrics(**(values | changes))


def _write(path, *steps, resume_step=0):
    sink = JsonlSink(path, resume_step=resume_step)
    for step in steps:
        sink.write(_metrics(step))
    sink.close()


def _steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


# The file ---------------------------------------------------------------------------------------


def test_a_line_holds_every_field_and_is_there_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, resume_step=0)
    sink.write(_metrics(1, mfu=0.5))
    (line,) = path.read_text().splitlines()
    assert json.loads(line).keys() >= REQUIRED
    assert read_metrics(path) == [_metrics(1, mfu=0.5)]
    sink.close()


def test_non_finite_numbers_are_null_and_read_back_as_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, resume_step=0)
    sink.write(_metrics(1, loss=math.nan, grad_norm=math.inf, skipped=True))
    sink.close()

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record["loss"] is None
    assert record["grad_norm"] is None
    (metrics,) = read_metrics(path)
    assert math.isnan(metrics.loss)
    assert metrics.skipped
    assert metrics.mfu is None


@pytest.mark.parametrize("torn", ['{"step": 4, "lo', '{"step": 4, "loss": 2.0', "{", "\0\0\0", '"'])
def test_a_line_torn_by_a_kill_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    _write(path, 1, 2, 3)
    with path.open("a") as file:
        file.write(torn)
    assert [m.step for m in read_metrics(path)] == [1, 2, 3]
    _write(path, 4, resume_step=3)
    assert _steps(path) == [1, 2, 3, 4]


@pytest.mark.parametrize("ending", ["\n", ""])
def test_a_file_that_needs_no_repair_is_not_rewritten(tmp_path, ending):
    path = tmp_path / "metrics.jsonl"
    _write(path, 1, 2)
    path.write_text(path.read_text().rstrip("\n") + ending)
    before = path.stat().st_ino
    _write(path, 3, resume_step=2)
    assert _steps(path) == [1, 2, 3]
    assert (path.stat().st_ino == before) == bool(ending)


def test_reading_names_what_is_wrong(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(ValueError, match="no such file"):
        read_metrics(path)


@pytest.mark.parametrize(
    "wrong",
    [
        '{"step": 3, "loss": 1.0}',
        '{"step": 3, "los',
        "[" * 100_000,
        "9" * 5000,
        "null",
        "\x00\xff{",
        *(
            json.dumps(asdict(_metrics(3)) | changed)
            for changed in ({"loss": "low"}, {"tokens": True}, {"skipped": 1}, {"step": None})
        ),
    ],
    ids=lambda line: line[:24],
)
def test_what_is_no_record_of_a_step_is_counted_and_left_out(tmp_path, caplog, wrong):
    path = tmp_path / "metrics.jsonl"
    _write(path, 1, 2)
    path.write_text(path.read_text() + wrong + "\n" + wrong + "\n")
    assert [m.step for m in read_metrics(path)] == [1, 2]
    assert "2 of 4 lines are left out, the first of them line 3" in caplog.text
    _write(path, 3, resume_step=2)
    assert _steps(path) == [1, 2, 3]


@pytest.mark.parametrize("fits", [0, 1, 100])
def test_a_line_that_finds_no_room_is_taken_back(tmp_path, fits):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, resume_step=0)
    sink.write(_metrics(1))
    whole = path.read_bytes()
    with (
        pytest.raises(OSError, match="File too large") as caught,
        file_size_limit(len(whole) + fits),
    ):
        sink.write(_metrics(2))
    assert caught.value.filename == str(path)
    assert path.read_bytes() == whole
    sink.write(_metrics(2))
    sink.close()
    assert _steps(path) == [1, 2]


def test_keys_of_later_versions_are_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, 1)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"novelty": 1}) + "\n")
    assert read_metrics(path) == [_metrics(1)]


# The line ---------------------------------------------------------------------------------------


_KNOWN = {"mfu": 0.471, "device_peak_bytes": round(1.31 * 2**30), "predicted_step_s": 24.6}


@pytest.mark.parametrize(
    ("changes", "capacity_bytes", "eta_s", "line"),
    [
        (
            _KNOWN,
            round(22.9 * 2**30),
            12_360,
            "step 12/500 | loss 2.431 | grad norm 0.70 | lr 3.0e-4 | 41.2k tok/s | mfu 47.1% | "
            "mem 1.31 of 22.9 GiB | step 25.4 s | plan 24.6 s | eta 3h26m",
        ),
        (
            {"offloaded_bytes": 3 * 2**29, "exposed_copy_s": 0.25},
            None,
            None,
            "step 12/500 | loss 2.431 | grad norm 0.70 | lr 3.0e-4 | 41.2k tok/s | "
            "offloaded 1.5 GiB (waited 250.0 ms) | step 25.4 s",
        ),
        (
            {
                **{"loss": math.nan, "skipped": True, "step_s": 0.25},
                "device_peak_bytes": 150 * 2**30,
            },
            None,
            42.0,
            "step 12/500 | loss nan (not finite: update skipped) | grad norm 0.70 | lr 3.0e-4 | "
            "41.2k tok/s | mem 150 GiB | step 250.0 ms | eta 42.0 s",
        ),
    ],
    ids=["everything known", "unknown left out", "skipped"],
)
def test_step_line(changes, capacity_bytes, eta_s, line):
    metrics = _metrics(12, **changes)
    found = step_line(metrics, total_steps=500, memory_capacity_bytes=capacity_bytes, eta_s=eta_s)
    assert found == line


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize(
    "changes",
    [
        {"mfu": 0.471, "offloaded_bytes": 3 * 2**29, "exposed_copy_s": 0.25},
        {
            **{"samples": 512, "split_subsequences": 7, "batched_subsequences": 91},
            **{"padding_tokens": 96, "bubble_fraction": 0.081, "planned_bubble_fraction": 0.075},
        },
        {"loss": math.nan, "skipped": True, "grad_norm": math.inf, "step_s": 9000.0},
        {"labels": 0, "grad_norm": 123456.0},
    ],
)
def test_step_lines_fit_a_terminal(changes, width):
    metrics = _metrics(
        12345, device_peak_bytes=round(1.31 * 2**30), predicted_step_s=24.6, **changes
    )
    line = step_line(
        metrics, total_steps=50_000, memory_capacity_bytes=23 * 2**30, eta_s=12_360, width=width
    )
    assert width - 40 < len(line) <= width
    assert "step 12345/50000 | loss " in line
