"""Claims of the page of results, and the reports that they come from."""

import re
from importlib.util import find_spec

import pytest

from experiments.claims import CLAIMS
from experiments.reports import RESULTS, report
from tests.documents import ROOT, pages


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.report)
def test_the_command_of_a_claim_exists(claim):
    for module in re.findall(r"python -m ([\w.]+)", claim.command):
        assert find_spec(module), module
    for script in re.findall(r"bash (\S+)", claim.command):
        assert (ROOT / script).is_file()


def test_what_is_simulated_is_not_called_measured():
    for claim in CLAIMS:
        provenance = report(claim.report).get("provenance", "measured")
        assert provenance.startswith(claim.kind), claim.report


def test_every_report_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    reports = [*RESULTS.glob("*.json"), *RESULTS.glob("*.txt")]
    assert not [path.name for path in reports if path.name not in text]
