"""Launch script for a million tokens: it plans anywhere, and trains by the plan if possible."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sppo.hardware.file import hardware_json
from sppo.hardware.this_machine import describe_cpu, divide_cpu, usable_memory_bytes
from tests.conftest import write_tokens

ROOT = Path(__file__).parents[2]
SMALL = {"SPPO_MODEL": "tiny-test", "SPPO_LENGTH": "2Ki", "SPPO_STEPS": "1"}


def launch(size, *words, directory, **variables):
    """The script, in ``directory``, with these variables and no others of ours."""
    others = {k: v for k, v in os.environ.items() if not k.startswith(("SPPO_", "SLURM_"))}
    environment = {"SPPO_VENV": sys.prefix, "SPPO_SKIP_INSTALL": "1", "OMP_NUM_THREADS": "2"}
    return subprocess.run(
        ["bash", str(ROOT / "scripts/train_1m.sh"), size, *words],
        cwd=directory,
        env={**others, **environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def plan_in(directory):
    (path,) = directory.glob("runs/*.plan.json")
    return json.loads(path.read_text())


@pytest.mark.exhaustive
def test_one_gpu_plans_a_million_tokens(tmp_path):
    done = launch("1gpu", directory=tmp_path, SPPO_DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert "1 sequence of 1Mi tokens a step" in done.stdout
    assert "dry run: nothing was started" in done.stdout
    assert plan_in(tmp_path)["boundaries"][-1] == 1 << 20
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["llama_1b_1m_1gpu.plan.json"]


@pytest.mark.parametrize(
    ("size", "variables", "ranks"),
    [
        pytest.param("1node", {"SPPO_DEVICES": "4"}, 4, marks=pytest.mark.exhaustive),
        ("cluster", {"SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_ON_NODE": "2"}, 6),
        pytest.param(
            *("cluster", {"SPPO_NODES": "1", "SLURM_JOB_NUM_NODES": "3"}, 8),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_every_device_of_the_job_is_planned_for(tmp_path, size, variables, ranks):
    words = (f"parallel.data_parallel_degree={ranks}", f"train.sequences_per_step={ranks}")
    done = launch(size, *words, directory=tmp_path, **SMALL, **variables, SPPO_DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert "step time is" in done.stdout
    plan = plan_in(tmp_path)
    assert plan["data_parallel_degree"] == ranks
    assert plan["hardware"]["num_nodes"] * plan["hardware"]["node"]["num_devices"] == ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_plan_for_gpus_is_not_started_where_there_is_none(tmp_path):
    tokens = str(write_tokens(tmp_path / "tokens"))
    done = launch("1node", directory=tmp_path, SPPO_TOKENS=tokens, SPPO_DEVICES="1", **SMALL)
    assert done.returncode == 1
    assert "error: this plan is for GPUs, and torch sees none here" in done.stderr
    assert not (tmp_path / "hardware.json").exists()
    assert not (tmp_path / "runs/llama_8b_1m_1node").exists()


@pytest.fixture
def two_cpus(tmp_path):
    """A directory with tokens, and a description of this machine that two ranks share."""
    spec = divide_cpu(describe_cpu(usable_memory_bytes()), 2)
    (tmp_path / "hardware.json").write_text(json.dumps(hardware_json(spec)))
    write_tokens(tmp_path / "tokens", num_tokens=3 * 2048)
    return {**SMALL, "SPPO_TOKENS": "tokens", "SPPO_DEVICES": "2", "OMP_NUM_THREADS": "1"}


def trained_by_two(directory, name):
    """Whether both ranks of a pipeline trained a step, by the plan."""
    assert plan_in(directory)["pipeline_parallel_degree"] == 2
    summary = json.loads((directory / f"runs/{name}/run_summary.json").read_text())
    line = json.loads((directory / f"runs/{name}/metrics.jsonl").read_text())
    return summary["steps"] == 1 and line["loss"] > 0


SRUN = """#!/usr/bin/env python3
# Starts tasks on this machine as srun would on its nodes, and writes down how it was asked.
import os, subprocess, sys
options = dict(w[2:].split("=") for w in sys.argv[1:] if w.startswith("--") and "=" in w)
first = next(i for i, w in enumerate(sys.argv) if i and not w.startswith("--"))
open("srun.asked", "w").write(" ".join(sys.argv[1:first]))
count = int(options["ntasks"])
place = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(count), "SLURM_NODEID": "0",
         "SLURM_STEP_TASKS_PER_NODE": str(count), "SLURM_STEP_NODELIST": "localhost"}
tasks = [subprocess.Popen(sys.argv[first:], env={**os.environ, **place, "SLURM_PROCID": str(i),
                                                 "SLURM_LOCALID": str(i)}) for i in range(count)]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.exhaustive
def test_a_slurm_job_starts_a_task_for_every_rank(tmp_path, two_cpus):
    srun = tmp_path / "bin/srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {
        "PATH": f"{srun.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_ON_NODE": "8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    variables = {name: value for name, value in two_cpus.items() if name != "SPPO_DEVICES"}
    words = ("parallel.pipeline_parallel_degree=2", "train.dtype=fp32")
    done = launch("cluster", *words, directory=tmp_path, **variables, **job)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "srun.asked").read_text() == (
        "--nodes=1 --ntasks=2 --ntasks-per-node=2 --cpus-per-task=4 "
        "--distribution=block:block --kill-on-bad-exit=1"
    )
    assert trained_by_two(tmp_path, "llama_8b_1m_cluster")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("cluster", "error: not in a SLURM job: sbatch --nodes=N"),
        ("slurm", "error: 'slurm' is not one of 1gpu, 1node, cluster"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path, size, message):
    done = launch(size, directory=tmp_path, SPPO_DRY_RUN="1")
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_sbatch_made_finds_the_repository(tmp_path):
    """SLURM runs the script from a spool directory, where nothing else is."""
    spool = tmp_path / "spool"
    spool.mkdir()
    script = spool / "slurm_script"
    script.write_text((ROOT / "scripts/train_1m.sh").read_text())
    environment = {**os.environ, "SLURM_SUBMIT_DIR": str(ROOT)}
    done = subprocess.run(
        ["bash", script, "cluster"], cwd=tmp_path, env=environment, capture_output=True
    )
    assert b"not in a SLURM job" in done.stderr


@pytest.mark.exhaustive
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
