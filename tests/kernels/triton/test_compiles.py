"""Triton kernels compile for GPUs without a GPU; other tests check their results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts/compiled_kernels.py"
KERNELS = {
    "norm_kernel",
    "norm_backward_kernel",
    "turn_kernel",
    "activation_kernel",
    "activation_backward_kernel",
    "merge_kernel",
    "cross_entropy_kernel",
    "sink_gradient_kernel",
    "grouped_product_kernel",
}
SHARED_KIB = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}
"""Of one program, by compute capability without its point."""


def compiled(tmp_path, capability, launches):
    output = tmp_path / "kernels.json"
    options = ["--capabilities", str(capability), "--launches", launches, "--json", str(output)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, *options], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())


def assert_fit(kernels, *, capability):
    assert {kernel["kernel"] for kernel in kernels} == KERNELS
    limit = SHARED_KIB[capability] << 10
    assert [kernel for kernel in kernels if kernel["shared_bytes"] > limit] == []


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_kernels_compile_and_fit(tmp_path):
    assert_fit(compiled(tmp_path, 90, "few"), capability=90)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_what_a_training_launches_spills_nothing(tmp_path, capability):
    assert_fit(compiled(tmp_path, capability, "training"), capability=capability)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_dtype_compiles_and_fits(tmp_path, capability):
    assert_fit(compiled(tmp_path, capability, "all"), capability=capability)
