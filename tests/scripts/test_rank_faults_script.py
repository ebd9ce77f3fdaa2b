"""``scripts/rank_faults.py``: it runs, and finds runs that end wrongly."""

from pathlib import Path

import pytest

from scripts.rank_faults import FAULTS, Ended, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (Ended(1, "error: rank 1 of 2 was killed by SIGKILL"), ""),
        (Ended(None, ""), "it did not end within"),
        (Ended(0, "killed by SIGKILL"), "exit code 0, not [1]"),
        (Ended(1, "Traceback\nkilled by SIGKILL"), "a traceback"),
        (Ended(1, "error: something else"), "['killed by SIGKILL'] not said"),
    ],
)
def test_how_a_job_ended_is_judged(ended, told):
    problem = ended.problem([1], "killed by SIGKILL")
    assert problem.startswith(told)
    assert bool(problem) == bool(told)


def test_a_case_that_fails_makes_the_exit_code_1(monkeypatch, capsys):
    monkeypatch.setitem(FAULTS, "few_files", lambda directory, dice: "it went wrong")
    monkeypatch.setattr("scripts.rank_faults.write_tokens", lambda directory, seed: None)
    assert main(["--only", "few_files", "--count", "2"]) == 1
    assert "2 cases, 2 failed (seed 0)" in capsys.readouterr().out
