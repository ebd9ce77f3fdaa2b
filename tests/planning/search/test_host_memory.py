"""Host memory is taken where it saves a percent of the step: no prediction is exact to less."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sppo.planning.search import solver
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluation import WORTH_IT, evaluate_candidate, with_less_host_memory
from sppo.units import GIB
from tests.planning.cases import candidate_of_subsequences, machine, run_config


def fastest(**activations):
    """The fastest placement of a step that offloads, on a machine with plenty of host memory."""
    candidate = candidate_of_subsequences(
        run_config("llama-3.1-8b", length="512Ki", activations=activations),
        hardware=machine(memory_bytes=66 * GIB),
        degrees=Degrees(1, 2, 4),
        num_subsequences=32,
        virtual_stages=4,
    )
    return evaluate_candidate(candidate)


def test_what_gains_less_than_a_percent_does_not_fill_the_host():
    before = fastest()
    after = with_less_host_memory(before)
    assert after.shortfall is None
    assert after.host_peak_bytes <= before.host_peak_bytes * 2 / 3
    assert after.device_peak_bytes <= after.candidate.budget_bytes
    assert before.time.step_s < after.step_s <= before.time.step_s / WORTH_IT
    assert after.candidate == before.candidate


@pytest.mark.parametrize("written", [{"policy": "offload_all"}, {"offload_ratio": 0.5}], ids=str)
def test_what_a_run_asks_to_offload_is_offloaded(written):
    before = fastest(**written)
    assert before.host_peak_bytes > 0
    assert with_less_host_memory(before) is before


@pytest.mark.parametrize(
    ("leaders", "best"),
    [
        ([(100.0, 8), (100.9, 4), (101.2, 1)], 1),
        ([(100.0, 8), (100.5, 8)], 0),
        ([(100.0, 0), (100.5, 0)], 0),
    ],
)
def test_of_steps_within_a_percent_the_least_host_memory_is_best(monkeypatch, leaders, best):
    monkeypatch.setattr(solver, "with_less_host_memory", lambda leader: leader)
    steps = [SimpleNamespace(step_s=seconds, node_host_bytes=host) for seconds, host in leaders]
    assert solver._with_less_host_memory(steps)[0] is steps[best]
