"""Launch scripts for a million tokens plan anywhere, and say what is missing before they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sppo.planning.hardware_file import hardware_json
from sppo.planning.this_machine import describe_cpu, usable_memory_bytes
from tests.conftest import write_tokens

ROOT = Path(__file__).parents[1]
SMALL = {"SPPO_MODEL": "tiny-test", "SPPO_LENGTH": "2Ki", "SPPO_STEPS": "1"}


def launch(
    name: str, *words: str, directory: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """One of the scripts, in ``directory``, with these variables and no others of ours."""
    others = {k: v for k, v in os.environ.items() if not k.startswith(("SPPO_", "SLURM_"))}
    environment = {"SPPO_VENV": sys.prefix, "SPPO_SKIP_INSTALL": "1", "OMP_NUM_THREADS": "2"}
    return subprocess.run(
        ["bash", str(ROOT / f"scripts/train_1m_{name}.sh"), *words],
        cwd=directory,
        env={**others, **environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def plan_in(directory: Path) -> dict:
    (path,) = directory.glob("runs/*.plan.json")
    return json.loads(path.read_text())


def test_one_gpu_plans_a_million_tokens(tmp_path):
    done = launch("1gpu", directory=tmp_path, SPPO_DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert "1 sequence of 1Mi tokens a step" in done.stdout
    assert "dry run: nothing was started" in done.stdout
    assert "note: this plan is for a GPU (h200), and this version trains on a CPU" in done.stdout
    assert plan_in(tmp_path)["boundaries"][-1] == 1 << 20
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["llama_1b_1m_1gpu.plan.json"]


@pytest.mark.parametrize(
    ("name", "variables", "ranks"),
    [
        ("1node", {"SPPO_DEVICES": "4"}, 4),
        ("slurm", {"SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_ON_NODE": "2"}, 6),
        ("slurm", {"SPPO_NODES": "1", "SLURM_JOB_NUM_NODES": "3"}, 8),
    ],
)
def test_what_needs_several_ranks_is_refused_before_anything_starts(
    tmp_path, name, variables, ranks
):
    """With tokens and all; every device of the job is planned for."""
    options = {**SMALL, **variables, "SPPO_TOKENS": str(write_tokens(tmp_path / "tokens"))}
    words = (f"parallel.data_parallel_degree={ranks}", f"train.sequences_per_step={ranks}")
    done = launch(name, *words, directory=tmp_path, **options)
    assert done.returncode == 1
    assert f"error: this plan needs {ranks} ranks, and this version trains on one" in done.stderr
    assert "step time is" in done.stdout
    assert not (tmp_path / "hardware.json").exists()
    hardware = plan_in(tmp_path)["hardware"]
    assert hardware["num_nodes"] * hardware["node"]["num_devices"] == ranks


def test_slurm_needs_a_job(tmp_path):
    done = launch("slurm", directory=tmp_path, SPPO_DRY_RUN="1")
    assert done.returncode == 2
    assert "error: not in a SLURM job: sbatch --nodes=N" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_sbatch_made_finds_the_repository(tmp_path):
    """SLURM runs the script from a spool directory, where nothing else is."""
    spool = tmp_path / "spool"
    spool.mkdir()
    script = spool / "slurm_script"
    script.write_text((ROOT / "scripts/train_1m_slurm.sh").read_text())
    environment = {**os.environ, "SLURM_SUBMIT_DIR": str(ROOT)}
    done = subprocess.run(["bash", script], cwd=tmp_path, env=environment, capture_output=True)
    assert b"not in a SLURM job" in done.stderr


def test_a_cpu_trains_by_the_plan_it_prints(tmp_path):
    spec = describe_cpu(usable_memory_bytes())
    missing = launch("1gpu", directory=tmp_path, **SMALL)
    assert missing.returncode == 2
    assert "error: no tokens in data/llama3: sppo data prepare" in missing.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "hardware.json").write_text(json.dumps(hardware_json(spec)))
    write_tokens(tmp_path / "tokens", num_tokens=3 * 2048)
    done = launch("1gpu", "train.dtype=fp32", directory=tmp_path, SPPO_TOKENS="tokens", **SMALL)
    assert done.returncode == 0, done.stderr
    assert "planning with hardware.json" in done.stdout
    summary = json.loads((tmp_path / "runs/llama_1b_1m_1gpu/run_summary.json").read_text())
    assert summary["steps"] == 1
    assert plan_in(tmp_path)["hardware"]["name"] == spec.name


def test_what_does_not_fit_stops_with_the_solvers_reasons(tmp_path):
    write_tokens(tmp_path / "data/llama3")
    done = launch("1gpu", directory=tmp_path, SPPO_MODEL="llama-3.1-70b")
    assert done.returncode == 3
    assert "error: nothing fits" in done.stderr
