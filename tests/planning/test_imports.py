"""No planning module imports torch, so that planning answers at once on any machine."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import sppo.activations
import sppo.cost
import sppo.hardware
import sppo.planning

PACKAGES = (sppo.activations, sppo.hardware, sppo.cost, sppo.planning)
MODULES = [
    info.name
    for package in PACKAGES
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
HEAVY = ("torch", "triton", "transformers", "safetensors", "matplotlib")


def loaded_by(*modules):
    """Which of the heavy packages a new process has after importing `modules`."""
    program = (
        "import importlib, sys\n"
        f"for name in {list(modules)!r}:\n"
        "    importlib.import_module(name)\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return result.stdout.split()


def test_no_module_of_planning_loads_torch():
    named = {
        "planning.search.solver",
        "planning.plan",
        "activations.hybrid",
        "hardware.this_machine",
    }
    assert {f"sppo.{name}" for name in named} <= set(MODULES)
    assert loaded_by(*MODULES) == []
