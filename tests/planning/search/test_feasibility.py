"""Quick answers about feasibility agree with the solver."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sppo.hardware.presets import PRESETS
from sppo.hardware.run_hardware import hardware_for
from sppo.planning.longest_sequence import fits_at_all, longest_sequence
from sppo.planning.search import evaluated_candidate
from sppo.planning.search.solver import quick_best, solve
from sppo.schedule.simulation.simulate import DeadlockError
from sppo.units import GIB, MIB
from tests.make import make_run
from tests.planning.cases import machine, run_config, solved
from tests.schedule.cases import make

KIB = 1 << 10
NODE = PRESETS["h100"]


def run_of(model="llama-3.2-1b", *, length=128 * KIB, **sections):
    return make_run(model, length=length, **sections)


@pytest.mark.parametrize(
    ("run", "hardware"),
    [
        (run_of(), NODE),
        (run_of(length=1024 * KIB), NODE),
        (run_of("tiny", length=16 * KIB), PRESETS["laptop-cpu"]),
        (run_of(length=64 * KIB, parallel={"sequence_parallel_degree": 2}), NODE),
    ],
)
def test_the_quick_time_is_near_the_solvers(run, hardware):
    # The quick answer knows the plain program only.
    parallel = run.parallel.model_copy(update={"schedule": "sppo"})
    run = run.model_copy(update={"parallel": parallel})
    best = solve(run, hardware=hardware).best
    assert best is not None
    assert fits_at_all(run, hardware)
    quick = quick_best(run, hardware)
    assert best.step_s * 0.98 <= quick.step_s <= best.step_s * 1.1


@pytest.mark.parametrize(
    ("length", "policy", "fits"),
    [(16, "retain", True), (448, "recompute", False), (448, "auto", True), (768, "auto", False)],
)
def test_fitting_is_what_the_solver_calls_fitting(length, policy, fits):
    run = run_of(
        length=length * KIB,
        model={"preset": "llama-3.2-1b", "num_layers": 4, "vocab_size": 16384},
        activations={"policy": policy},
        hardware={"preset": "h100", "devices_per_node": 2},
    )
    little = machine(
        hardware_for(run.hardware),
        memory_bytes=5 * GIB + 512 * MIB,
        reserved_bytes=0,
        host_memory_bytes=16 * GIB,
    )
    assert (solve(run, hardware=little).best is not None) is fits
    assert fits_at_all(run, little) is fits
    assert (quick_best(run, little) is not None) is fits


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"sequence_parallel_degree": 16}},
        {"activations": {"policy": "sppo"}},
    ],
)
def test_what_cannot_be_asked_does_not_fit(sections):
    run = run_of(length=64 * KIB, **sections)
    bare = replace(NODE, node=replace(NODE.node, host_memory_bytes=0))
    assert not fits_at_all(run, bare)
    assert quick_best(run, bare) is None


def test_a_deadlock_is_no_request_that_does_not_fit(monkeypatch):
    """It is a bug, which nothing that tries many requests may swallow."""

    def deadlocked(*_, **__):
        raise DeadlockError("ranks wait", make("sppo", p=1, n=1, m=1), np.zeros(1, dtype=int))

    monkeypatch.setattr(evaluated_candidate, "simulate_step", deadlocked)
    with pytest.raises(DeadlockError):
        quick_best(run_of(), NODE)


@pytest.mark.parametrize("policy", ["retain", "recompute"])
def test_on_a_cpu_fewer_subsequences_may_be_what_fits(policy):
    """The process grows with what oneDNN compiles for bf16 and every length."""
    run = run_of(
        "tiny",
        length=13000,
        sequence={"partition": "flops"},
        activations={"policy": policy},
        train={"dtype": "bf16"},
        parallel={"schedule": "sppo"},
    )
    laptop = PRESETS["laptop-cpu"]
    answers = solve(run, hardware=laptop).by_num_subsequences
    needed = {len(each.candidate.lengths): each.device_peak_bytes for each in answers}
    assert min(needed.values()) < needed[max(needed)] * 0.95
    device = replace(laptop.device, memory_bytes=min(needed.values()) + MIB, reserved_bytes=0)
    little = replace(laptop, device=device)
    assert fits_at_all(run, little)
    best = solve(run, hardware=little).best
    assert best is not None
    assert len(best.candidate.lengths) < max(needed)
    assert not fits_at_all(run, replace(laptop, device=replace(device, memory_bytes=100 * MIB)))


def test_the_longest_sequence_in_more_subsequences_than_1ki():
    run = run_of(
        sequence={"num_subsequences": 1100},
        activations={"policy": "retain"},
        parallel={"schedule": "sppo", "virtual_stages": 1},
    )
    one = replace(machine(NODE, memory_bytes=60 * GIB), node=replace(NODE.node, num_devices=1))
    longest = longest_sequence(run, one)
    assert longest > 1100
    assert not fits_at_all(run.with_values({"sequence.length": longest + KIB}), one)


def test_sequence_parallelism_spans_nodes_only_if_nothing_fits_inside():
    keys = {"schedule": "sppo", "virtual_stages": 1, "pipeline_parallel_degree": 1}
    model = {"preset": "llama-3.2-1b", "num_layers": 4}
    run = run_of(model=model, length=64 * KIB, parallel=keys, activations={"policy": "retain"})
    two = replace(machine(NODE, num_devices=2, reserved_bytes=0), num_nodes=2)
    inside = quick_best(run, two)
    assert inside.degrees.sequence_parallel == 2
    small = machine(two, memory_bytes=inside.device_peak_bytes * 3 // 4)
    across = quick_best(run, small)
    assert across.degrees.sequence_parallel == 4
    assert fits_at_all(run, small)
    assert not fits_at_all(run, replace(small, num_nodes=1))


def test_fewer_subsequences_fit_where_host_memory_grows_with_their_number():
    """The last subsequence is not offloaded: with many, more of the others is in host memory."""
    run = run_config(
        {"preset": "gpt-7b", "num_layers": 4},
        length=16384,
        parallel={
            "pipeline_parallel_degree": 4,
            "sequence_parallel_degree": 1,
            "data_parallel_degree": 1,
        },
        activations={"policy": "sppo", "host_memory": "4GiB"},
        hardware={"preset": "a100-40g", "nodes": 8},
    )
    best = solved(run).best
    assert best is not None
    assert len(best.candidate.lengths) == 1
    assert best.shortfall is None
