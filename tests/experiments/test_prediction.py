"""Predictions of runs without measuring: run files are valid, and sums correct."""

from __future__ import annotations

from experiments import prediction
from sppo.config import check_run


def test_every_case_is_a_valid_run(tmp_path):
    titles = set()
    for case in (*prediction.CASES, *prediction.random_cases(20, seed=0)):
        hardware = tmp_path / "hardware.json"
        keys = prediction.run_keys(case, tmp_path, steps=3, hardware=hardware)
        run = check_run(keys, source="test")
        assert run.sequence.num_subsequences == case.num_subsequences
        assert run.activations.policy == case.policy
        assert run.hardware.file == str(hardware)
        titles.add(case.title)
    assert len(titles) > 20


def test_the_step_is_the_sum_of_its_phases(capsys):
    seconds = {"forward": (1.0, 2.0), "backward": (3.0, 2.5), "data and update": (0.5, 0.5)}
    phases = {name: {"predicted": p, "measured": m} for name, (p, m) in seconds.items()}
    memory = {"all": {"predicted": 1 << 20, "measured": 2 << 20}}
    row = {"case": "one", "phases_s": phases, "memory_bytes": memory, "machine_speed": 1.0}
    prediction.print_rows([row])
    prediction.print_deviations([row])
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.strip().startswith("one")]
    assert "1 2 s -50.0%   3 2.5 s +20.0%   0.5 0.5 s +0.0%   4.5 5 s -10.0%" in line
    assert "step time, as measured: off by 10.0%, at worst 10.0%" in said
    assert "all: off by up to 50.0% in 1 of 1 runs" in said
