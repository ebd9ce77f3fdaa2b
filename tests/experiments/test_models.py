"""Plans of models of today, and the table of them."""

import json

from experiments import harness, models


def test_a_row_is_planned_and_shown():
    found = models.row("tiny", "4Ki", 1)
    json.dumps(found)
    line = models.markdown([found]).splitlines()[-1]
    assert line.startswith("| tiny | 4Ki | 8 | SP ")
    speed = 4096 / found["step_s"] / 8
    assert f" | {speed:.0f} | {found['mfu']:.1%} | " in line


def test_what_fits_nowhere_is_said():
    row = {"model": "m", "tokens": "1Mi", "devices": 8, "feasible": False}
    assert models.markdown([row]).splitlines()[-1] == "| m | 1Mi | 8 | does not fit | | | | |"


def test_the_page_has_the_table_of_the_report():
    report = json.loads((harness.ROOT / "docs/results/planned_models.json").read_text())
    page = (harness.ROOT / "docs/results.md").read_text()
    assert models.markdown(report["rows"]) in page
    cells = {(row["model"], row["tokens"], row["devices"]) for row in report["rows"]}
    assert len(cells) == len(models.MODELS) * len(models.LENGTHS) * len(models.NODES)
