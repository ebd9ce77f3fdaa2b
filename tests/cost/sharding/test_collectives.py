"""Collectives among devices with the same weights, inside a node and across nodes."""

from __future__ import annotations

import numpy as np
import pytest

from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.sharding.collectives import shard_seconds
from tests.planning.cases import machine, run_config

LINKS = {"intra_node_bytes_per_s": 100.0, "inter_node_bytes_per_s": 10.0}


def seconds(*, data: int, pipeline: int = 1, sequence: int = 1, copies: int = 1) -> float:
    hardware = machine(nodes=16, **LINKS)
    workload = Workload(run_config().model, hardware, sequence_parallel_degree=sequence)
    candidate = Candidate(
        workload, (64,), data_parallel_degree=data, pipeline_parallel_degree=pipeline
    )
    return float(shard_seconds(candidate, np.array(1000.0), copies=copies))


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        pytest.param({"data": 1}, 0.0, id="alone"),
        pytest.param({"data": 8}, 1000 * 7 / 8 / 100, id="replicas of one node"),
        pytest.param({"data": 2, "pipeline": 4}, 1000 / 2 / 100, id="two pipelines of one node"),
        pytest.param({"data": 16}, 1000 * 15 / 16 / 80, id="eight ports of each of two nodes"),
        pytest.param({"data": 2, "pipeline": 8}, 1000 / 2 / 10, id="one port of each of two nodes"),
        pytest.param(
            {"data": 2, "pipeline": 4, "sequence": 4, "copies": 4}, 1000 * 7 / 8 / 40, id="4 ports"
        ),
        pytest.param({"data": 9}, 1000 * 8 / 9 / 10, id="one replica alone in its node"),
        pytest.param({"data": 12}, 1000 * 11 / 12 / 40, id="four replicas in the second node"),
        pytest.param({"data": 4, "pipeline": 3}, 1000 * 3 / 4 / 10, id="a stage with 3 and 1"),
        pytest.param({"data": 2, "pipeline": 3}, 1000 / 2 / 100, id="all of it in one node"),
        pytest.param({"data": 1, "sequence": 8, "copies": 8}, 1000 * 7 / 8 / 100, id="a group"),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_link(degrees, expected):
    assert seconds(**degrees) == pytest.approx(expected)
