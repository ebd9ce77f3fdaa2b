"""Drawn stops of jobs, beside the formula of the planner."""

import json

import pytest

from experiments import harness
from experiments.effective_time import simulated
from sppo.hardware.faults import time_shares
from sppo.planning.effective_time import EffectiveTime

REPORT = harness.ROOT / "docs/results/effective_time.json"


def cells():
    for row in json.loads(REPORT.read_text())["rows"]:
        for every, found in row["every"].items():
            yield pytest.param(row, found, id=f"{row['job']}, {row['rate']}, {every}")


@pytest.mark.parametrize(("row", "found"), list(cells()))
def test_the_report_is_what_is_drawn_and_the_formula_agrees(row, found):
    restart_s = json.loads(REPORT.read_text())["restart_s"]
    times = {"save_s": row["save_s"], "between_stops_s": row["between_stops_s"]}
    shares = time_shares(found["interval_s"], restart_s=restart_s, **times)
    drawn = simulated(
        EffectiveTime(interval_s=found["interval_s"], restart_s=restart_s, shares=shares, **times)
    )
    assert drawn == pytest.approx({key: found[key] for key in drawn})
    assert found["predicted"] == pytest.approx(shares.effective)
    error = 4 * drawn["standard_error"]
    for name in ("effective", "saving", "restarting", "lost"):
        assert drawn[name] == pytest.approx(getattr(shares, name), abs=error, rel=0.01)


def test_no_fixed_number_of_steps_is_better_than_the_automatic_interval():
    for row in json.loads(REPORT.read_text())["rows"]:
        best = max(row["every"].values(), key=lambda found: found["effective"])
        automatic = row["every"]["auto"]
        assert automatic["effective"] >= best["effective"] - 4 * best["standard_error"], row["job"]
