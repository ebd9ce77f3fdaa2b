"""Bytes of the messages of running units."""

from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.memory.unit_messages import sent_bytes
from tests.planning.cases import machine, run_config

MODEL = run_config("llama-3.2-1b").model


def test_the_ends_of_a_pipeline_have_one_neighbour():
    candidate = Candidate(Workload(MODEL, machine()), (256, 128), pipeline_parallel_degree=3)
    row = MODEL.hidden_size * 2
    assert sent_bytes(candidate)[0].tolist() == [
        [2 * 256 * row, 2 * 128 * row],
        [4 * 256 * row, 4 * 128 * row],
        [2 * 256 * row, 2 * 128 * row],
    ]
