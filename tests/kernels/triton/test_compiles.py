"""The kernels also compile for GPUs, which needs none; what they compute shows elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNELS = {
    "forward_kernel",
    "delta_kernel",
    "query_gradient_kernel",
    "key_gradient_kernel",
    "norm_kernel",
    "norm_backward_kernel",
    "turn_kernel",
    "activation_kernel",
    "activation_backward_kernel",
    "merge_kernel",
    "cross_entropy_kernel",
    "squares_kernel",
    "root_kernel",
    "scale_kernel",
}
SHARED_KIB = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}
"""Of one program, by compute capability without its point."""


def compiled(tmp_path, *words):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compiled_launches", *words]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_fit(launches, *, capability):
    assert {launch["kernel"] for launch in launches} == KERNELS
    limit = SHARED_KIB[capability] << 10
    assert [launch for launch in launches if launch["shared_bytes"] > limit] == []


@pytest.mark.timeout(300)
def test_kernels_compile_and_fit(tmp_path):
    assert_fit(compiled(tmp_path, "90"), capability=90)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_dtype_and_head_size_compiles_and_fits(tmp_path, capability):
    launches = compiled(tmp_path, str(capability), "everything")
    assert_fit(launches, capability=capability)
