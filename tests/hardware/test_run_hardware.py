"""The CPUs of a run's machine are divided among its ranks, another machine's by its own threads."""

import json
from dataclasses import asdict, replace

import pytest

from sppo.hardware import this_machine
from sppo.hardware.presets import PRESETS
from sppo.hardware.rates import GemmPoint
from sppo.hardware.run_hardware import run_hardware
from tests.planning.cases import run_config

POINTS = tuple(
    GemmPoint("fp32", tokens, width, 1e11, 1e11, 1e11)
    for tokens in (256, 1024)
    for width in (256, 1024)
)


@pytest.fixture
def server(tmp_path):
    """A file of the measured rates of 64 threads."""
    laptop = PRESETS["laptop-cpu"]
    device = replace(laptop.device, gemm_points=POINTS, num_multiprocessors=64)
    path = tmp_path / "server.json"
    described = asdict(replace(laptop, name="a server", device=device, provenance="calibrated"))
    path.write_text(json.dumps(described))
    return path


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_machine_keeps_the_rates_of_its_threads(server, ranks, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = run_config(
        "tiny", hardware={"file": str(server)}, parallel={"pipeline_parallel_degree": ranks}
    )
    device = run_hardware(run).device
    assert device.num_multiprocessors == 64 // ranks
    assert device.gemm_points[0].forward_flops_per_s == pytest.approx(1e11 / ranks)


def test_this_machine_is_divided_by_the_threads_of_its_ranks(server, monkeypatch):
    here = replace(this_machine.detect_machine(), name="a server")
    monkeypatch.setattr(this_machine, "detect_machine", lambda: here)
    monkeypatch.setattr(this_machine, "threads_of_rank", lambda ranks: 1)
    run = run_config("tiny", hardware={"file": str(server)})
    assert run_hardware(run).device.num_multiprocessors == 1


@pytest.mark.parametrize(
    ("nodes", "ranks", "of_each"), [(1, 4, 4), (2, 1, 1), (2, 2, 1), (2, 3, 2), (2, 4, 2)]
)
def test_ranks_are_spread_over_the_nodes(nodes, ranks, of_each):
    """Each node's CPU is divided among the ranks on that node."""
    laptop = PRESETS["laptop-cpu"]
    run = run_config(
        "tiny",
        hardware={"preset": "laptop-cpu", "nodes": nodes},
        parallel={"pipeline_parallel_degree": ranks},
    )
    seen = run_hardware(run)
    assert seen.num_devices == nodes * of_each
    assert seen.device.memory_bytes == laptop.device.memory_bytes // of_each
    assert seen.device.fp32_flops_per_s == pytest.approx(laptop.device.fp32_flops_per_s / of_each)
