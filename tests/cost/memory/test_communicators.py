"""Memory of NCCL's communicators in plans: it grows with their number, and one GPU has none."""

from __future__ import annotations

import pytest

from sppo.cost.candidate import Candidate
from sppo.cost.communicators import communicators_bytes
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.units import KIB
from tests.cost.memory.test_process_growth import MODEL

H100 = PRESETS["h100"]
EACH = H100.network.communicator_bytes
LIMITED = EACH // 4
DEEP = MODEL.model_copy(update={"num_layers": 4, "num_heads": 8})


def candidate(hardware=H100, *, width=1, **options):
    workload = Workload(DEEP, hardware, sequence_parallel_degree=width)
    return Candidate(workload, (KIB,) * 4, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0),
        ({"hardware": PRESETS["laptop-cpu"], "pipeline_parallel_degree": 2}, 0),
        ({"data_parallel_degree": 2}, EACH),
        ({"data_parallel_degree": 2, "zero": 3}, EACH + LIMITED),
        ({"pipeline_parallel_degree": 2}, 2 * LIMITED),
        ({"pipeline_parallel_degree": 2, "data_parallel_degree": 2}, EACH + 2 * LIMITED),
        # The ranks of a stage, and an all-to-all with seven peers.
        ({"width": 8}, EACH + round(0.7 * 7 * EACH)),
    ],
)
def test_every_communicator_counts(options, expected):
    first, *_ = evaluate_candidate(candidate(**options)).memory
    assert first.device.communicators_bytes == pytest.approx(expected, abs=1)
    assert first.device.total_bytes >= first.device.communicators_bytes


def test_each_range_of_shared_units_takes_two_communicators():
    shared = candidate(pipeline_parallel_degree=4, schedule="sppo_msp")
    bytes_with = [
        communicators_bytes(shared, position=1, ranges=[(0, last) for last in range(1, 1 + count)])
        for count in range(4)
    ]
    assert [b - a for a, b in zip(bytes_with, bytes_with[1:], strict=False)] == [EACH + LIMITED] * 3
    ranks = evaluate_candidate(shared).memory
    at_least = communicators_bytes(shared, position=1) + EACH + LIMITED
    assert ranks[1].device.communicators_bytes >= at_least, "its program shares units"
