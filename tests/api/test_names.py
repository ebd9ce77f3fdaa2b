"""Names of ``import sppo``, the time to import them, and the examples in their docstrings."""

import doctest
import importlib
import re
import subprocess
import sys

import pytest

import sppo


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sppo.__all__)
def test_every_name_is_there_and_explains_itself(name):
    value = getattr(sppo, name)
    if name != "__version__":
        assert re.match(r"\w.*\.$", value.__doc__.split("\n\n")[0], re.S), name
        assert value.__module__.startswith("sppo.")
    assert name in dir(sppo)


def test_importing_loads_nothing_else():
    code = (
        "import sys; before = set(sys.modules); import sppo; "
        "print(*sorted(set(sys.modules) - before))"
    )
    heavy = ("sppo", "torch", "numpy", "pydantic", "rich", "typer")
    assert [name for name in run(code).split() if name.startswith(heavy)] == [
        "sppo",
        "sppo.version",
    ]


TELL = "import os; print(os.environ.get('OMP_WAIT_POLICY'), len(caught))"


@pytest.mark.parametrize(
    ("given", "first", "says"),
    [
        (None, "sppo", "passive 0"),
        (None, "torch", "None 1"),
        ("active", "sppo", "active 0"),
        ("active", "torch", "active 0"),
    ],
)
def test_waiting_threads_sleep_or_a_warning_says_why_not(given, first, says, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    catch = "import warnings; caught = []; warnings.showwarning = lambda *a: caught.append(a)"
    # A module of this name in its place: nothing here needs torch itself.
    torch = "import sys; sys.modules['torch'] = None" if first == "torch" else ""
    assert run(f"{catch}\n{torch}\nimport sppo\n{TELL}") == f"{says}\n"


@pytest.mark.parametrize(
    "module",
    ["sppo", "sppo.config.loading", "sppo.api", "sppo.training.trained_run"],
)
def test_examples_of_docstrings(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0
    assert result.attempted > 0 or module == "sppo"
