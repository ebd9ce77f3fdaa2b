"""Seconds of a step by part: the parts of every stage, and the rates behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sppo.cost.attention_backend import planned_backend
from sppo.cost.candidate import Candidate
from sppo.cost.layer import PART_NAMES
from sppo.cost.packed_sequence import PackedSequence
from sppo.cost.workload import Workload
from sppo.hardware.description import HardwareSpec
from sppo.hardware.presets import PRESETS
from sppo.hardware.run_hardware import hardware_for
from sppo.planning.explain import PARTS, rates_used, step_parts
from sppo.planning.search.candidates import workload_of
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluation import evaluate_candidate
from tests.planning.cases import PERFECT, run_config

CASES = {
    "one stage": {"pipeline_parallel_degree": 1},
    "four stages": {"sequences": 3},
    "recomputed": {"policy": "recompute"},
    "offloaded": {"policy": "offload_all"},
    "multiplexed": {"schedule": "sppo_msp"},
    "weights sharded": {"zero": 3, "data_parallel_degree": 4},
    "several stages": {"schedule": "looped_bfs", "virtual_stages": 2, "data_parallel_degree": 4},
    "keys recomputed": {
        "schedule": "looped_bfs",
        "virtual_stages": 2,
        "kv": "recomputed",
        "zero": 3,
        "data_parallel_degree": 4,
    },
    "inputs shared": {"policy": "keep_attention", "input_every": 2},
}


def some_candidate(case: str, *, hardware: HardwareSpec = PRESETS["h100"]) -> Candidate:
    workload = Workload(run_config("llama-3.2-1b").model, hardware)
    options = {"pipeline_parallel_degree": 4, "policy": "retain", **CASES[case]}
    return Candidate(workload, (8192, 6144, 4096, 2048), **options)


@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_each_rank_are_the_step(case):
    evaluated = evaluate_candidate(some_candidate(case))
    costs = evaluated.costs
    passes = costs.forward_s + costs.backward_s + costs.weight_s + costs.kv_recompute_s
    own = passes.sum(axis=1)
    own = own.reshape(-1, evaluated.candidate.pipeline_parallel_degree).sum(axis=0)
    computed = (*PART_NAMES, "recompute", "zero_collectives", "beside_copies", "carried")
    for rank, parts in enumerate(step_parts(evaluated)):
        assert tuple(parts) == tuple(PARTS)
        assert sum(parts.values()) == pytest.approx(evaluated.step_s, rel=1e-9)
        assert sum(parts[name] for name in computed) == pytest.approx(own[rank], rel=1e-9)
        assert all(parts[name] >= -1e-9 * own[rank] for name in computed)
        assert (parts["recompute"] > 1e-9 * parts["products"]) == (
            case in ("recomputed", "keys recomputed", "inputs shared")
        )
        assert (abs(parts["borrowed"]) > 1e-9 * own[rank]) == (case == "multiplexed")
        assert parts["communication"] >= -1e-9 * own[rank]
        waits_s = evaluated.simulated.waited_s(rank, "bubble") - costs.reduce_s[rank]
        assert parts["bubble"] == pytest.approx(waits_s, abs=1e-9 * own[rank])


@pytest.mark.parametrize("packed", [False, True])
def test_on_a_perfect_machine_rates_are_the_peak(packed):
    candidate = some_candidate("four stages", hardware=PERFECT)
    if packed:
        short, length = (64,) * (sum(candidate.lengths) // 128), sum(candidate.lengths) // 2
        sequences = (PackedSequence((length,), (length,)), PackedSequence(short, (length,)))
        candidate = candidate.with_packed(sequences)
    rates = {rate.figure: rate for rate in rates_used(evaluate_candidate(candidate))}
    assert rates["matrix products"].value == pytest.approx(rates["matrix products"].peak, rel=0.01)
    assert rates["attention"].value == pytest.approx(rates["attention"].peak, rel=0.01)


def test_rates_name_the_back_end_and_who_measured_it():
    used = rates_used(evaluate_candidate(some_candidate("one stage")))
    rates = {rate.figure: rate for rate in used}
    assert "FlashAttention-3 paper" in rates["attention (cudnn)"].source
    assert 0.2 < rates["attention (cudnn)"].value / rates["attention (cudnn)"].peak < 0.5
    assert "mamf-finder" in rates["matrix products"].source


def test_documents_are_not_priced_with_a_back_end_that_takes_none():
    backends = []
    for data in ({"tokens": "data"}, {"tokens": "data", "isolate_documents": True}):
        run = run_config(data=data, hardware={"preset": "h100"})
        hardware = hardware_for(run.hardware)
        workload = workload_of(run, hardware=hardware, degrees=Degrees(1, 1, 8))
        backends.append(planned_backend(workload))
    assert backends == ["cudnn", "flash_attn_2"]


@pytest.mark.parametrize(
    ("stages", "of_node", "named"),
    [(1, 8, set()), (4, 8, {"inside a node"}), (4, 2, {"inside a node", "between nodes"})],
)
def test_links_are_named_where_they_are_used(stages, of_node, named):
    node = replace(PRESETS["h100"].node, num_devices=of_node)
    hardware = replace(PRESETS["h100"], node=node, num_nodes=2)
    candidate = some_candidate("four stages", hardware=hardware)
    evaluated = evaluate_candidate(replace(candidate, pipeline_parallel_degree=stages))
    figures = [rate.figure for rate in rates_used(evaluated)]
    assert {f.removeprefix("links ") for f in figures if f.startswith("links ")} == named
