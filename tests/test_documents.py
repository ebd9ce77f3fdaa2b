"""Every command and program of the README and of the documentation runs as written.

What is fenced as ``bash`` is run in order, in a directory of the page. What is fenced as ``python``
is one program, run where its first block stands. ``sh`` cannot run here, or is not for a test. Long
commands get arguments that make them short; nothing else is changed. The default tier runs what a
page begins with, of the README the quickstart: later commands are those of tests/cli.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks, pages, statements
from tests.tiers import default_of, examples

SHORT = "sequence.length=1Ki"  # of all commands that share a run
STRETCHED = "sequence.length=2Ki"  # the same of a model that was trained on 1Ki tokens
SHORTER = {
    "bash scripts/quickstart.sh": " quickstart sequence.length=1Ki train.steps=2",
    "python -m experiments.cpu": " --lengths 512 --steps 1",
    "python -m experiments.pipelining": " --length 512 --subsequences 2 --sequences 2",
    "python -m experiments.orders": " --length 512 --steps 1",
    "sppo bench": " --quick",
    "sppo solve configs/run/gpt_7b": " sequence.num_subsequences=8 parallel.schedule=sppo",
    "sppo train run.yaml": f" {SHORT}",
    "sppo train configs/run/tutorial.yaml": f" {SHORT}",
    "sppo eval run.yaml": f" {SHORT}",
    "sppo train short.yaml": " train.steps=2 train.sequences_per_step=1",
    "sppo train stage2.yaml": f" {STRETCHED}",
    "sppo train base.yaml": " train.steps=2",
    **dict.fromkeys(("sppo train lora.yaml", "sppo solve lora.yaml"), f" {SHORT} train.steps=2"),
    **dict.fromkeys(("sppo train 4k.yaml", "sppo train 8k.yaml"), " train.steps=2"),
    **dict.fromkeys(("sppo eval 8k.yaml --initial", "sppo eval 8k.yaml --png"), " --sequences 1"),
}
"""Arguments appended to a command that takes minutes."""
FIRST_PARTS = 2
"""Of a page, run in the default tier."""
NOT_RUN = {"bash scripts/test.sh"}
"""What runs this test."""


def parts_of(page: Path) -> list[tuple[str, str]]:
    """Return language and code of what is run of a page, in order."""
    run = [block for block in blocks(page) if block.language in ("bash", "python")]
    program = "\n".join(block.text for block in run if block.language == "python")
    parts = [(b.language, program if b.language == "python" else b.text) for b in run]
    return [part for part in dict.fromkeys(parts) if part[1] not in NOT_RUN]


def shortened(code: str) -> str:
    """Return code whose long commands have arguments that make them short."""
    lines = []
    for statement in statements(code):
        added = [extra for prefix, extra in SHORTER.items() if statement.startswith(prefix)]
        lines.append("".join([statement, *added]))
    return "\n".join(lines)


@pytest.mark.parametrize(
    "page",
    default_of(filter(parts_of, pages()), ROOT / "README.md", ROOT / "docs/data.md"),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_code_of_a_page(page: Path, tmp_path: Path) -> None:
    for name in ("experiments", "scripts", "sppo", "configs", "setup.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SPPO_VENV": sys.prefix,
        "SPPO_SKIP_INSTALL": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    for language, code in parts_of(page)[: examples(FIRST_PARTS, all=99)]:
        shell = ["bash", "-euo", "pipefail", "-c", shortened(code)]
        done = subprocess.run(
            shell if language == "bash" else [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


def shown_plans() -> Iterator[tuple[str, str]]:
    """Yield each command that plans and is followed by lines of what it prints."""
    for page in pages():
        found = blocks(page)
        for run, shown in pairwise(found):
            planning = run.text.startswith(("sppo solve", "sppo estimate"))
            if planning and run.language == "bash" and shown.language == "text":
                yield run.text.partition(" -o ")[0], shown.text


SHOWN = list(shown_plans())


@pytest.mark.parametrize("plan", default_of(SHOWN, SHOWN[0]))
def test_plans_that_pages_show_are_those_that_are_printed(plan: tuple[str, str]) -> None:
    command, shown = plan
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    printed = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert {" ".join(line.split()) for line in shown.splitlines()} <= printed, done.stdout
