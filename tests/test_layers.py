"""Import rules between packages: the contracts in pyproject.toml hold, and can fail."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLANNING_CORE = (
    *("sppo.units", "sppo.config", "sppo.schedule", "sppo.timeline"),
    *("sppo.activations", "sppo.hardware", "sppo.cost", "sppo.planning"),
)
MOST_MODULES = 20
HEAVY = ("torch", "numpy", "pydantic", "ruamel.yaml", "scipy", "matplotlib", "rich.table")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]


def modules_after(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def lint(directory: Path, *, package: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on ``package`` with the project's settings."""
    shutil.copy(ROOT / "pyproject.toml", directory)
    code = (
        "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command;"
        " lint_imports_command(['--no-cache'])"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", code.replace("'.'", repr(str(package.parent)))],
        capture_output=True,
        text=True,
        cwd=directory,
    )


def test_contracts_hold(tmp_path):
    done = lint(tmp_path, package=ROOT / "sppo")
    assert done.returncode == 0, done.stdout
    assert f"{len(CONTRACTS)} kept, 0 broken" in done.stdout


PLANTED = {
    "units.py": ("import torch", "The planning core never reaches torch"),
    "cost/flops.py": ("from sppo.kernels import linear", "Layers: "),
    "engine/unit.py": ("from sppo.training import trainer", "Layers: "),
    "schedule/actions.py": ("from sppo.schedule import encoding", "No circles"),
    "schedule/orders/steps.py": ("from sppo.schedule import simulation", "Layers of the schedule"),
    "offload/arena.py": ("from sppo.offload import slots", "Layers of the offload package"),
    "engine/trace.py": ("from sppo.engine import stage", "Layers of the engine package"),
    "kernels/native/native_file.py": ("from sppo.kernels.native import extension", "No circles"),
}
"""What is added to a module, and the contract that it breaks."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """What import-linter says of a package with all of :data:`PLANTED`, by contract."""
    directory = tmp_path_factory.mktemp("planted")
    package = directory / "sppo"
    shutil.copytree(ROOT / "sppo", package, ignore=shutil.ignore_patterns("__pycache__"))
    for module, (line, _) in PLANTED.items():
        with (package / module).open("a") as file:
            file.write(f"\n{line}\n")
    done = lint(directory, package=package)
    assert done.returncode == 1, done.stdout
    _, *parts = re.split(r"\n(.+)\n-{5,}\n", done.stdout.partition("Broken contracts")[2])
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("module", PLANTED)
def test_a_planted_violation_is_found(broken, module):
    (report,) = (text for name, text in broken.items() if name.startswith(PLANTED[module][1]))
    assert re.search(rf"\b{Path(module).stem}\b", report)


def test_every_package_has_its_layer():
    layers = CONTRACTS[0]["layers"]
    named = {name.strip() for layer in layers for name in layer.split("|")}
    found = {
        f"sppo.{path.stem}"
        for path in (ROOT / "sppo").iterdir()
        if path.name not in ("__init__.py", "__pycache__")
        and (path.suffix == ".py" or path.is_dir())
    }
    assert named == found


def test_no_folder_has_more_modules_than_one_can_see():
    for folder in [path.parent for path in (ROOT / "sppo").rglob("__init__.py")]:
        modules = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        assert len(modules) <= MOST_MODULES, f"{folder.relative_to(ROOT)}: split it by subject"


def test_the_planning_core_runs_without_torch():
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in PLANNING_CORE
        for path in sorted(ROOT.glob(f"{package.replace('.', '/')}/**/*.py"))
    ]
    assert len(names) > 20
    loaded = modules_after("import " + ", ".join(["sppo.units", *names]))
    assert {name for name in loaded if name.partition(".")[0] in ("torch", "safetensors")} == set()


def test_the_command_line_starts_without_anything_heavy():
    loaded = modules_after("import sppo.cli.app")
    assert loaded & set(HEAVY) == set()


UPDATED = """
import torch
from sppo.config.run import OptimizerConfig
from sppo.kernels import cross_entropy, elementwise, gradient_norm, rotary
from sppo.kernels.attention import block_attention, interface
from sppo.optim.fused_adamw import FusedAdamW

x = torch.ones(2)
FusedAdamW([x], [[x], [x]], config=OptimizerConfig(), weight_decay=0.1).step([x], lr=1e-3)
"""


def test_a_cpu_trains_without_triton_and_torch_s_compiler():
    """Each is a second of every process that trains; kernels for GPUs import Triton when called."""
    assert modules_after(UPDATED) & {"triton", "torch._dynamo"} == set()
