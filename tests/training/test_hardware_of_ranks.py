"""Training and planning see the same machine for the ranks of a run."""

import pytest

from sppo.config import load_run
from sppo.hardware.run_hardware import run_hardware
from sppo.training.preflight import preflight
from tests.training.jobs import job_beside


@pytest.mark.parametrize(("nodes", "local_ranks"), [(1, 4), (2, 2), (4, 1)])
def test_the_cpu_is_divided_as_planned(work, run_file, nodes, local_ranks):
    run = load_run(
        run_file(
            model={"num_layers": 4},
            parallel={"pipeline_parallel_degree": 4},
            hardware={"preset": "laptop-cpu", "nodes": nodes},
        )
    )
    trained = preflight(job_beside(run, local_ranks=local_ranks)).plan.hardware
    planned = run_hardware(run)
    assert trained.num_nodes == planned.num_nodes == nodes
    assert trained.node.num_devices == planned.node.num_devices == local_ranks
    for name in ("num_multiprocessors", "fp32_flops_per_s", "memory_bytes_per_s"):
        assert getattr(trained.device, name) == getattr(planned.device, name)
