"""Plans of models of today, and the table of them."""

import json
from math import prod

import pytest

from experiments import harness, models


def test_a_row_is_planned_and_shown():
    found = models.row("tiny", "4Ki", node="h100", nodes=1)
    json.dumps(found)
    line = models.markdown([found]).splitlines()[-1]
    assert line.startswith("| tiny | 4Ki | 8 H100 | SP ")
    speed = 4096 / found["step_s"] / 8
    assert f" | {speed:.0f} | {found['mfu']:.1%} | " in line


def test_what_fits_nowhere_is_said():
    row = {"model": "m", "tokens": "1Mi", "devices": 8, "node": "h200", "feasible": False}
    assert models.markdown([row]).splitlines()[-1] == "| m | 1Mi | 8 H200 | does not fit | | | | |"


@pytest.mark.parametrize("table", models.TABLES)
def test_the_report_has_every_cell(table):
    report = json.loads((harness.ROOT / f"docs/results/planned_{table}.json").read_text())
    cells = {(row["model"], row["tokens"], row["devices"]) for row in report["rows"]}
    assert len(cells) == prod(map(len, models.TABLES[table]))
