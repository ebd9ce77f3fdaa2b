"""Every command of the README runs as written, in the order in which it stands there.

The long ones get extra arguments that make them short; nothing else is changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PASSIVE = "OMP_WAIT_POLICY=passive python scripts"
SHORT = "sequence.length=1Ki"  # of all commands that share a run
SHORTER = {
    "bash scripts/quickstart.sh": " quickstart sequence.length=1Ki train.steps=2",
    "cat > run.yaml": f" {SHORT}",
    "sppo train run.yaml": f" {SHORT}",
    "sppo eval run.yaml": f" {SHORT}",
    "bash scripts/compare_cpu.sh": " --lengths 512 --steps 1",
    "bash scripts/compare_pipelining.sh": " --length 512 --pieces 2 --sequences 2",
    "bash scripts/compare_msp.sh": " --length 512 --steps 1",
    f"{PASSIVE}/offload_cpu.py": " --length 512 --pieces 2 --steps 1",
    f"{PASSIVE}/compare_cross_entropy.py": " --tokens 64 --vocabulary 512 --hidden 64 --turns 1",
    f"{PASSIVE}/compare_attention.py": " --length 512 --tokens 256 --turns 1",
    "sppo bench": " --quick",
    "sppo train configs/run/tiny_cpu.yaml": " sequence.length=1Ki train.steps=2",
}
"""Arguments appended to a command that takes minutes."""
SUBCOMMANDS = ("sppo train", "sppo eval", "sppo solve", "sppo bench")
NOT_RUN = {"bash scripts/test.sh": "it is what runs this test"}


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    return [block.strip() for block in blocks]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory with the repository's scripts in it, shared by all commands."""
    directory = tmp_path_factory.mktemp("readme")
    for name in ("scripts", "sppo", "configs", "setup.py"):
        (directory / name).symlink_to(ROOT / name)
    return directory


@pytest.mark.parametrize("command", commands(), ids=lambda c: c.splitlines()[0][:48])
def test_command_of_the_readme(command: str, directory: Path) -> None:
    if command in NOT_RUN:
        pytest.skip(NOT_RUN[command])
    for prefix, extra in SHORTER.items():
        if command.startswith(prefix):
            command += extra
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SPPO_VENV": sys.prefix,
        "SPPO_SKIP_INSTALL": "1",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_readme_has_its_main_commands() -> None:
    text = "\n".join(commands())
    for command in (
        "scripts/quickstart.sh",
        "scripts/test.sh",
        "sppo train",
        "sppo eval",
        "sppo solve",
    ):
        assert command in text


def test_files_named_in_the_readme_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    missing = [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]
    assert not missing
