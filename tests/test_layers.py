"""Import rules between packages: the contracts in pyproject.toml hold, and little is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLANNING_CORE = (
    *("sppo.units", "sppo.config", "sppo.schedule"),
    *("sppo.activations", "sppo.hardware", "sppo.cost", "sppo.planning"),
)
HEAVY = ("torch", "numpy", "pydantic", "ruamel.yaml", "scipy", "matplotlib", "rich.table")


def modules_after(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_contracts_hold():
    code = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_the_planning_core_runs_without_torch():
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in PLANNING_CORE
        for path in sorted(ROOT.glob(f"{package.replace('.', '/')}/**/*.py"))
    ]
    assert len(names) > 20
    loaded = modules_after("import " + ", ".join(["sppo.units", *names]))
    heavy = {"torch", "triton", "transformers", "safetensors", "matplotlib"}
    assert {name.partition(".")[0] for name in loaded} & heavy == set()


def test_the_command_line_starts_without_anything_heavy():
    loaded = modules_after("import sppo.cli.app")
    assert loaded & set(HEAVY) == set()


UPDATED = """
import torch
from sppo.config.optimizer import OptimizerConfig
from sppo.cost.parameter_groups import UpdateRule
from sppo.kernels import cross_entropy, elementwise, rotary
from sppo.kernels.attention import block_attention, interface
from sppo.optim import gradient_norm
from sppo.optim.fused_adamw import FusedAdamW

x = torch.ones(2)
rule = UpdateRule(1.0, 0.1)
FusedAdamW([x], [[x], [x]], config=OptimizerConfig(), rule=rule).step([x], lr=1e-3)
"""


def test_a_cpu_trains_without_triton_and_torch_s_compiler():
    """Each is a second of every process that trains; kernels for GPUs import Triton when called."""
    assert modules_after(UPDATED) & {"triton", "torch._dynamo"} == set()
