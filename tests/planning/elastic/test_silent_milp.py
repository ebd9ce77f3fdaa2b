"""Output of the solver's native library is silenced; all other standard output is kept."""

import subprocess
import sys

import numpy as np
from scipy.optimize import Bounds, LinearConstraint

from sppo.planning.elastic.silent_milp import milp

CODE = """
import ctypes, os, sys
from sppo.planning.elastic.silent_milp import without_output
c = ctypes.CDLL(None)
print("before")
c.puts(b"before, in C")
with without_output():
    c.puts(b"of a library")
    os.write(1, b"of a library")
    print("of Python", file=sys.stderr)
try:
    with without_output():
        c.puts(b"of a library")
        raise KeyError
except KeyError:
    print("after")
c.puts(b"after, in C")
"""
CLOSED = """
import os
from sppo.planning.elastic.silent_milp import without_output
os.close(1)
with without_output():
    os.write(2, b"done")
os._exit(0)
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_what_is_printed_within_is_dropped():
    done = run(CODE)
    assert sorted(done.stdout.split("\n")) == sorted(
        ["", "before", "before, in C", "after", "after, in C"]
    )
    assert done.stderr == "of Python\n"


def test_standard_output_may_be_closed():
    assert run(CLOSED).stderr == "done"


def test_it_solves_and_says_nothing(capfd):
    most = LinearConstraint(np.array([[2.0, 3.0]]), -np.inf, 4.0)
    given = {"integrality": np.ones(2), "bounds": Bounds(0, 1), "constraints": [most]}
    found = milp(np.array([-1.0, -2.0]), **given, options={"disp": True})
    assert found.x.tolist() == [0.0, 1.0]
    assert capfd.readouterr().out == ""
