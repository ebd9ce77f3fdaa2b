"""Requests at the limits of the schema are answered or refused after a bounded amount of work."""

from __future__ import annotations

import pytest

from sppo.hardware.run_hardware import hardware_for
from sppo.planning.search import evaluated_candidate
from sppo.planning.search.choices import CUT_UNIT
from sppo.planning.search.solver import solve
from tests.make import make_run
from tests.tiers import default_of

MOST_UNITS = 1_000_000
"""Units whose placements are priced, that are simulated, and that programs may cut: each takes 0.01
to 0.05 ms. The request with most, that of 4096 layers, takes 12 s on one core."""
SMALL = {"vocab_size": 256, "hidden_size": 32, "num_layers": 4, "num_heads": 2, "mlp_size": 64}
GPT = {"preset": "gpt-7b"}
LLAMA = {"preset": "llama-3.1-8b"}
REQUESTS = {
    "a thousand million tokens": (SMALL, 10**9, 1, 1, {}),
    "64Mi tokens": (SMALL, 1 << 26, 1, 1, {}),
    "as many layers as there may be": ({**SMALL, "num_layers": 4096}, 1 << 20, 1, 8, {}),
    "as many devices as there may be": (SMALL, 1 << 20, 1 << 20, 1, {}),
    "as many in one node": (SMALL, 1 << 20, 1, 1 << 20, {}),
    "as many sequences as there may be": (SMALL, 1 << 16, 2, 8, {"sequences_per_step": 1 << 14}),
    "units cut over 128 devices": (GPT, 1 << 19, 16, 8, {"multiplexed": "on"}),
    "little memory for units cut over 96": (LLAMA, 1 << 22, 12, 8, {"multiplexed": "on"}),
}
"""Model, tokens, nodes, devices of each, and further keys."""


@pytest.fixture
def units(monkeypatch) -> list[int]:
    """Return a list to which each evaluation, simulation and program adds its units."""
    done: list[int] = []

    def counting(function, times):
        def counted(memory, *, candidate, **options):
            units = candidate.num_stages * len(candidate.lengths) * candidate.sequences
            done.append(units * times)
            return function(memory, candidate=candidate, **options)

        return counted

    def simulate_step(program, *, costs):
        done.append(costs.forward_s.size)
        return simulate(program, costs=costs)

    simulate = evaluated_candidate.simulate_step
    monkeypatch.setattr(evaluated_candidate, "simulate_step", simulate_step)
    for name, times in (("with_placement", 1), ("with_program", CUT_UNIT)):
        function = getattr(evaluated_candidate, name)
        monkeypatch.setattr(evaluated_candidate, name, counting(function, times))
    return done


@pytest.mark.parametrize(
    "name", default_of(REQUESTS, "64Mi tokens", "as many devices as there may be")
)
def test_large_requests_take_bounded_work(name: str, units: list[int]):
    model, length, nodes, devices, keys = REQUESTS[name]
    train = {key: value for key, value in keys.items() if key == "sequences_per_step"}
    parallel = {key: value for key, value in keys.items() if key == "multiplexed"}
    hardware = {"preset": "a100-80g", "nodes": nodes, "devices_per_node": devices}
    run = make_run(model, length=length, train=train, parallel=parallel, hardware=hardware)
    solution = solve(run, hardware=hardware_for(run.hardware))
    assert solution.best is not None or all(one.reason for one in solution.rejected)
    assert sum(units) <= MOST_UNITS
