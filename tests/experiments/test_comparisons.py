"""Every comparison at a minimal size: its sides run in turns, agree, and are reported."""

import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


def _orders_agree(found):
    assert found["loss_difference"] < 1e-4
    plain, multiplexed, looped = found["sides"].values()
    assert multiplexed["planned_over_first"] < 1
    assert looped["planned_idle_share"] < plain["planned_idle_share"]
    assert all(0 <= side["idle_share"] < 1 for side in found["sides"].values())


def _sides_of_a_cpu_agree(found):
    rows = {row["side"]: row for row in found["measurements"]}
    losses = {side: row["loss"] for side, row in rows.items()}
    assert losses["sppo keep_attention"] == losses["sppo looped disk"]
    assert losses["transformers"] == pytest.approx(losses["sppo looped disk"], rel=0.01)
    hybrid, everywhere = rows["sppo hybrid"], rows["sppo attention everywhere"]
    assert hybrid["kv_bytes"] == everywhere["kv_bytes"] / 4
    predicted = hybrid["predicted_peak_bytes"]
    assert hybrid["tensors_peak_bytes"] == pytest.approx(predicted, rel=0.05)


def _both_compute_the_same(found):
    (case,) = found["cases"]
    ours, theirs = case["sides"]["sppo"], case["sides"]["torch"]
    assert theirs["schedule"] == "1F1B"
    assert case["largest_difference"] < 0.02
    assert min(ours["peak_bytes"] + theirs["peak_bytes"]) > 0
    assert 0 < ours["idle_share"] < 1


def _packings_train_the_same(found):
    assert found["loss_difference"] < 1e-4
    assert list(found["simulated"]) == ["2", "4"]
    for name, side in found["measured"].items():
        assert 0 <= side["idle_share"] < 1
        predicted = side["predicted_peak_bytes"]
        assert side["peak_bytes"] == pytest.approx(predicted, rel=0.05), name


def _rows_stand_beside_the_paper(found):
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["none"]["speedup"] == 1
    papers = {name: row["paper"] for name, row in rows.items() if row["paper"] is not None}
    assert papers == {"none": 1.0, "offload_all": 0.91, "sppo": 1.23, "sppo + MSP": 1.44}


RUN = (
    f"{ROOT}/configs/run/gpt_7b_512k_32gpu.yaml model.preset=tiny-gpt sequence.length=4Ki "
    "hardware.nodes=1"
)


class Comparison(NamedTuple):
    """Options of a minimal size, the check of the report, and files that it draws."""

    words: str
    check: Callable[[dict[str, Any]], None]
    drawn: tuple[str, ...] = ()


COMPARISONS = {
    "orders": Comparison(
        "--length 512 --steps 1 --sides sppo,sppo_msp,looped_bfs:2 --plot a.png",
        _orders_agree,
        ("a.png",),
    ),
    "cpu": Comparison(
        "--lengths 512 --steps 0 --threads 1 --disk . --plot a.png "
        "--sides sppo\\ keep_attention,sppo\\ looped\\ disk,transformers,"
        "sppo\\ attention\\ everywhere,sppo\\ hybrid",
        _sides_of_a_cpu_agree,
        ("a.png",),
    ),
    "ablation": Comparison(
        f"{RUN} parallel.pipeline_parallel_degree=2", _rows_stand_beside_the_paper
    ),
    "packings": Comparison(
        "--samples 6 --scale 0.05 --longest 512 --steps 1 --turns 1 --simulated-ranks 4 --plots . "
        "--sides padded,stream,fixed,elastic,elastic_auto",
        _packings_train_the_same,
        ("elastic_fixed.png", "elastic_elastic.png"),
    ),
    "pipelining": Comparison("--length 128 --subsequences 2 --sequences 2", _both_compute_the_same),
}
DEFAULT_TIER = ("ablation",)


def _tier(name):
    """The one that starts no processes; what the others compare is tested by itself elsewhere."""
    return pytest.param(name, marks=() if name in DEFAULT_TIER else pytest.mark.exhaustive)


@pytest.mark.parametrize("name", [_tier(name) for name in COMPARISONS])
def test_the_sides_run_and_are_reported(name, tmp_path):
    words, check, drawn = COMPARISONS[name]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            f"experiments.{name}",
            *shlex.split(words),
            "--output",
            "found.json",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"].startswith(f"python -m experiments.{name} ")
    check(found)
    for file in drawn:
        assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("orders", "--steps 0", "--steps: 0 is too small; write a number from 1 on"),
        ("orders", "--sides sppo,gpipe", "--sides: 'gpipe' is not one of sppo, sppo_msp, "),
        ("packings", "--ranks 1", "--ranks 1: one rank has no pipeline to fill"),
        ("cpu", "--sides other", "--sides: 'other' is not one of sppo retain, "),
        ("cpu", "--sides sppo\\ disk", "'sppo disk' offloads: name a directory with --disk DIR"),
    ],
)
def test_options_that_cannot_be_are_refused(name, words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(words)])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"experiments.{name}").main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def _fails(rank, arguments):
    del arguments
    if rank == 1:
        raise ValueError("rank 1 does not start")
    return list


@pytest.mark.exhaustive
def test_a_rank_that_fails_ends_the_comparison():
    """Although the other rank, which waits for it, would wait for hours."""
    from experiments.harness import Side

    with pytest.raises(SystemExit, match="error: a side: a rank failed"):
        Side("a side", _fails, None, ranks=2)
