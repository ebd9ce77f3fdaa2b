"""Scripts for users: well-formed, executable, and explicit about their requirements."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCED = ROOT / "scripts/environment.sh"


@pytest.mark.parametrize("path", sorted(ROOT.glob("scripts/*.sh")), ids=lambda path: path.name)
def test_the_syntax_of_a_script(path):
    subprocess.run(["bash", "-n", path], check=True)


def environment(tmp_path, *, python, extra=""):
    """``make_environment`` with an interpreter and an environment directory of our own."""
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source '{SOURCED}'; make_environment {extra}"],
        env={
            "PATH": os.environ["PATH"],
            "SPPO_PYTHON": python,
            "SPPO_VENV": str(tmp_path / "a venv"),
        },
        capture_output=True,
        text=True,
    )


def fake_python(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_an_old_python_is_refused(tmp_path):
    old = fake_python(
        tmp_path / "python",
        'if [ "$1" = --version ]; then echo Python 3.9.2; exit 0; fi; exit 1',
    )
    done = environment(tmp_path, python=old)
    assert done.returncode == 1
    assert done.stderr == (
        "error: Python 3.9.2 is too old; SPPO needs Python 3.11 or newer (set SPPO_PYTHON)\n"
    )
    assert not (tmp_path / "a venv").exists()


RECORDING = r"""
log=$(dirname "$0")/log
case "$1" in
-c) case "$2" in *sys.exit*) exit 0 ;; *) exit 1 ;; esac ;;
-m) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"
    printf '#!/bin/sh\necho pip "$@" >>"%s"\n%s\n' "$log" "$PIP_ENDS" >"$3/bin/pip"
    chmod +x "$3/bin/pip" ;;
esac
"""


def test_installs_once_and_again_when_asked_for_more(tmp_path):
    python = fake_python(tmp_path / "python", RECORDING)
    log = tmp_path / "log"
    first = environment(tmp_path, python=python)
    assert first.returncode == 0, first.stderr
    lines = log.read_text().splitlines()
    assert any("torch==2.13.0" in line for line in lines)
    assert f"--editable {ROOT}" in lines[-1]
    assert environment(tmp_path, python=python).stdout == ""
    assert log.read_text().splitlines() == lines
    assert environment(tmp_path, python=python, extra="'[dev]'").returncode == 0
    assert log.read_text().splitlines()[-1].endswith(f"--editable {ROOT}[dev]")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: it would run for minutes")
def test_the_gpu_check_says_that_there_is_no_gpu_and_leaves_nothing(tmp_path):
    done = subprocess.run(
        ["bash", ROOT / "scripts/gpu_check.sh", tmp_path / "out"],
        env={**os.environ, "SPPO_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_communicators_are_measured_by_two_ranks(tmp_path):
    """On the CPU, which shows that the script itself works."""
    command = [sys.executable, ROOT / "scripts/gpu_messages.py", "found.json", "--rehearse"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=200)
    rows = json.loads((tmp_path / "found.json").read_text())["communicators"]
    assert [row["max_ctas"] for row in rows] == [None, 4, 8, 32]
    assert all(len(row["beside_open_receive_s"]) == 5 for row in rows)


AS_IF_ON_A_GPU = """
case "$*" in
*get_device_name*) echo Some GPU torch 2 CUDA 13 ;;
*device_count*) echo 2 ;;
*gpu_messages.py*) echo '{"communicators": 3}' >"$2" ;;
"- "*) exec "$REAL_PYTHON" "$@" ;;
*gpu_training.py*) echo broken >&2; exit 1 ;;
*"-m pytest"*) echo "7 passed" ;;
*"bench all"*) echo words; echo '{"attention_backends": []}' ;;
esac
"""


def test_the_gpu_check_puts_everything_into_one_report(tmp_path):
    python = fake_python(tmp_path / "python", AS_IF_ON_A_GPU)
    done = subprocess.run(
        ["bash", ROOT / "scripts/gpu_check.sh", tmp_path / "out"],
        env={**os.environ, "SPPO_PYTHON": python, "REAL_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "failed: training\n"
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["device"] == "Some GPU torch 2 CUDA 13"
    ends = {name: step["end"] for name, step in report["steps"].items()}
    assert ends.pop("training") == "failed"
    done_steps = ["build", "tests", "sanitizer", "messages", "two_gpus", "bench"]
    assert list(ends.items()) == [(name, "done") for name in done_steps]
    assert report["bench"] == {"attention_backends": []}
    assert (report["tests"], report["training"]) == ("7 passed", None)
    assert report["hardware"] is None
    assert report["messages"] == {"communicators": 3}


def test_the_gpu_check_has_a_test_to_run_under_the_sanitizer():
    script = (ROOT / "scripts/gpu_check.sh").read_text()
    (chosen,) = re.findall('^sanitized="(.*)"$', script, re.MULTILINE)
    command = (
        "-m pytest -q --collect-only -m gpu -p no:cacheprovider tests/offload/test_cuda_lane.py"
    )
    collected = subprocess.run(
        [sys.executable, *command.split(), "-k", chosen], cwd=ROOT, capture_output=True, text=True
    )
    assert collected.returncode == 0, collected.stdout


def test_the_gpu_check_installs_carried_wheels_first(tmp_path):
    calls = """
echo "$PYTHONPATH: $*" >>"$(dirname "$0")/log"
case "$*" in *"pip install"*) exit 0 ;; *) exit 1 ;; esac
"""
    python, wheels = fake_python(tmp_path / "python", calls), tmp_path / "wheels"
    wheels.mkdir()
    command = ["bash", ROOT / "scripts/gpu_check.sh", tmp_path / "out"]
    env = {**os.environ, "SPPO_PYTHON": python, "SPPO_WHEELS": "wheels", "PYTHONPATH": ""}

    def check():
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2
        return done.stderr

    assert check() == (
        "error: SPPO_WHEELS=wheels holds no wheel (*.whl): name a directory that does, or leave it "
        "out\n"
    )
    (wheels / "carried-1-py3-none-any.whl").touch()
    assert "needs a CUDA device" in check()
    installed, looked = (tmp_path / "log").read_text().splitlines()[:2]
    target = re.search(r"--no-index --no-deps --target (\S+) ", installed)[1]
    assert installed.endswith(f" {wheels}/carried-1-py3-none-any.whl")
    assert looked.startswith(f"{ROOT}:{target}: -c ")
