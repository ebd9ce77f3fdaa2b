"""Every command of the README and of the documentation runs as written, in order within a page.

What is fenced as ``bash`` is run, and then what is fenced as ``python``, as one program; ``sh`` is
what cannot run here, or is not for a test. Each page has a directory of its own. Long commands get
arguments that make them short; nothing else is changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks, pages, statements

PASSIVE = "OMP_WAIT_POLICY=passive python scripts"
SHORT = "sequence.length=1Ki"  # of all commands that share a run
STRETCHED = "sequence.length=2Ki"  # the same of a model that was trained on 1Ki tokens
SHORTER = {
    "bash scripts/quickstart.sh": " quickstart sequence.length=1Ki train.steps=2",
    "python -m experiments.cpu": " --lengths 512 --steps 1",
    "python -m experiments.pipelining": " --length 512 --subsequences 2 --sequences 2",
    "python -m experiments.msp": " --length 512 --steps 1",
    f"{PASSIVE}/offload_cpu.py": " --length 512 --pieces 2 --steps 1",
    "sppo bench": " --quick",
    "sppo train run.yaml": f" {SHORT}",
    "sppo eval run.yaml": f" {SHORT}",
    "sppo train short.yaml": " train.steps=2 train.sequences_per_step=1",
    "sppo train long.yaml": f" {STRETCHED} train.steps=2 train.sequences_per_step=1",
    "sppo eval long.yaml": f" {STRETCHED} --sequences 1",
}
"""Arguments appended to a command that takes minutes."""
NOT_RUN = {"bash scripts/test.sh": "it is what runs this test"}
ELSEWHERE = {"docs/data.md": "tests/cli/test_data_doc.py runs it"}
LANGUAGES = {"bash", "sh", "text", "yaml", "python", "pycon", "bibtex"}


def _cases() -> list[tuple[str, str]]:
    """Page and code of each block that is run."""
    return [
        (name, block.text)
        for page in pages()
        if (name := page.relative_to(ROOT).as_posix()) not in ELSEWHERE
        for block in blocks(page)
        if block.language == "bash"
    ]


def _programs() -> dict[str, str]:
    """What is fenced as ``python`` on each page."""
    found = {}
    for page in pages():
        parts = [block.text for block in blocks(page) if block.language == "python"]
        name = page.relative_to(ROOT).as_posix()
        if parts and name not in ELSEWHERE:
            found[name] = "\n".join(parts)
    return found


def shortened(code: str) -> str:
    """Return code whose long commands have arguments that make them short."""
    lines = []
    for statement in statements(code):
        added = [extra for prefix, extra in SHORTER.items() if statement.startswith(prefix)]
        lines.append("".join([statement, *added]))
    return "\n".join(lines)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An empty directory for each page, with the repository's scripts in it."""
    made = {}
    for page in dict.fromkeys(name for name, _ in _cases()):
        made[page] = tmp_path_factory.mktemp(Path(page).stem)
        for name in ("experiments", "scripts", "sppo", "configs", "setup.py"):
            (made[page] / name).symlink_to(ROOT / name)
    return made


@pytest.mark.parametrize(
    ("page", "code"),
    _cases(),
    ids=[f"{name}: {code.splitlines()[0]}"[:90] for name, code in _cases()],
)
def test_commands_of_a_page(page: str, code: str, directories: dict[str, Path]) -> None:
    if code in NOT_RUN:
        pytest.skip(NOT_RUN[code])
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SPPO_VENV": sys.prefix,
        "SPPO_SKIP_INSTALL": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", shortened(code)],
        cwd=directories[page],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{page}\n{code}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(("page", "code"), _programs().items(), ids=[*_programs()])
def test_python_of_a_page(page: str, code: str, directories: dict[str, Path]) -> None:
    """After the commands of the same page, which may make what it reads."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directories[page],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{page}\n{done.stdout}\n{done.stderr}"


def test_every_block_says_what_it_is() -> None:
    """Or a command would be left out for a forgotten word."""
    found = {
        f"{page.relative_to(ROOT)}: {block.language!r}: {block.text[:40]}"
        for page in pages()
        for block in blocks(page)
        if block.language not in LANGUAGES
    }
    assert not found


def test_readme_has_its_main_commands() -> None:
    text = "\n".join(code for page, code in _cases() if page == "README.md")
    for command in (
        "scripts/quickstart.sh",
        "scripts/test.sh",
        "sppo train",
        "sppo eval",
        "sppo solve",
    ):
        assert command in text


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sppo bench all", "sppo bench all --quick"),
        ("sppo bench all \\\n  -o x", "sppo bench all \\\n  -o x --quick"),
        ("cat > a <<'EOF'\nsppo bench all\nEOF", "cat > a <<'EOF'\nsppo bench all\nEOF"),
        ("ls\nsppo bench gemm\nls", "ls\nsppo bench gemm --quick\nls"),
    ],
)
def test_commands_are_shortened_one_by_one(code: str, expected: str) -> None:
    assert shortened(code) == expected
