"""Plans with and without adapters, and the table of them."""

import json

from experiments import adapters, harness


def test_a_row_is_planned_and_shown():
    found = adapters.row("tiny", "4Ki", adapters.ADAPTER, [1, 2])
    assert found["trains"] == "adapters of rank 16"
    assert found["fewest_devices"] == 1
    json.dumps(found)
    heading, _, line = adapters.markdown([found]).splitlines()
    assert heading == "| model, tokens | trains | 1 H100 | 2 H100 | fits from |"
    assert line.startswith("| tiny, 4Ki | adapters of rank 16 | ")
    assert line.endswith(" | 1 H100 |")
    assert found["plans"][0]["node_host_peak_bytes"] == 0
    assert " B host" not in line


def test_what_fits_nowhere_is_said():
    plans = [{"devices": 1, "feasible": False}]
    row = {"model": "m", "tokens": "1Ki", "trains": "all", "fewest_devices": None, "plans": plans}
    assert adapters.markdown([row]).splitlines()[-1] == "| m, 1Ki | all | no | none of these |"


def test_the_page_has_the_table_of_the_report():
    report = json.loads((harness.ROOT / "docs/results/planned_adapters.json").read_text())
    page = (harness.ROOT / "docs/howto/fit_with_adapters.md").read_text()
    assert adapters.markdown(report["rows"]) in page
