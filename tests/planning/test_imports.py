"""Planning answers at once and anywhere: none of its modules leads to torch."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import sppo.planning

MODULES = sorted(info.name for info in pkgutil.iter_modules(sppo.planning.__path__))
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
    assert {"solver", "plan", "hybrid", "this_machine"} <= set(MODULES)
    assert loaded_by(*(f"sppo.planning.{name}" for name in MODULES)) == []


def test_every_module_can_be_the_first_to_be_imported():
    """No circle of imports that only some orders survive."""
    program = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}:\n"
        "    for loaded in [n for n in sys.modules if n.startswith('sppo.planning')]:\n"
        "        del sys.modules[loaded]\n"
        "    importlib.import_module(f'sppo.planning.{name}')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
