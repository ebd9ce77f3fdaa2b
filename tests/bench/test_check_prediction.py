"""scripts/check_prediction.py without measurements: its run files are valid, its sums correct."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from sppo.config import load_run
from sppo.hardware.file import hardware_json
from sppo.hardware.presets import PRESETS

SCRIPT = Path(__file__).parents[2] / "scripts/check_prediction.py"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield importlib.import_module("check_prediction")
        del sys.modules["check_prediction"]


def test_every_case_is_a_run_of_its_own(script, tmp_path):
    hardware = tmp_path / "hardware.json"
    hardware.write_text(json.dumps(hardware_json(PRESETS["laptop-cpu"])))
    titles = set()
    for index, case in enumerate(script.CASES):
        path = tmp_path / f"case_{index}.yaml"
        script.write_run(case, path, steps=3, hardware=hardware)
        run = load_run(path, ())
        assert run.sequence.num_subsequences == case.num_subsequences
        assert run.activations.policy == case.policy
        assert run.hardware.file == str(hardware)
        titles.add(script.title(case))
    assert len(titles) == len(script.CASES)


def test_the_step_is_the_sum_of_its_phases(script, capsys):
    seconds = {"forward": (1.0, 2.0), "backward": (3.0, 2.5), "data and update": (0.5, 0.5)}
    phases = {name: {"predicted": p, "measured": m} for name, (p, m) in seconds.items()}
    script.print_rows([{"case": "one", "phases_s": phases}])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("one"))
    assert row.split()[1:] == [
        *("1.000", "2.000", "-50.0%"),
        *("3.000", "2.500", "+20.0%"),
        *("0.500", "0.500", "+0.0%"),
        *("4.500", "5.000", "-10.0%"),
    ]


def test_the_report_says_how_it_was_made(script, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check_prediction.py", "a b", "--steps", "9"])
    path = tmp_path / "report.json"
    script.write_report(path, [{"case": "one"}], PRESETS["laptop-cpu"])
    report = json.loads(path.read_text())
    assert report["command"] == "bash scripts/check_prediction.sh 'a b' --steps 9"
    assert (report["machine"], report["cases"]) == ("laptop-cpu", [{"case": "one"}])
