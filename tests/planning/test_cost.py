"""Analytic costs: their sums are the model's FLOPs and bytes, whatever the cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sppo.config.loading import check_run
from sppo.planning.activation_policy import saved_bytes_per_token
from sppo.planning.cost import (
    CostRequest,
    analytic_costs,
    hiding_ratios,
    layers_of_stages,
    stage_parameters,
)
from sppo.planning.flops import forward_flops
from sppo.planning.hardware import PRESETS
from sppo.planning.parameters import num_parameters
from sppo.planning.simulated_run import RunShape, simulated_run
from sppo.schedule.simulate import simulate


def run_config(**sections):
    raw = {
        "model": {"preset": "llama-3.2-1b"},
        "data": {"tokens": "data"},
        "sequence": {"length": 65536, "num_subsequences": 8},
        "hardware": {"preset": "a100-80g"},
        **sections,
    }
    return check_run(raw, source="test")


MODEL = run_config().model
PERFECT = replace(
    PRESETS["a100-80g"],
    gemm_efficiency=1.0,
    attention_efficiency=1.0,
    attention_backward_efficiency=1.0,
    half_efficiency_tokens=0,
)


def request(**change):
    return replace(CostRequest(MODEL, PERFECT, ((4096, 3000, 1096),)), **change)


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_forward_time_on_a_perfect_machine_is_the_models_flops(num_ranks):
    costs = analytic_costs(request(num_ranks=num_ranks))
    flops = forward_flops(MODEL, start=0, end=8192)
    assert costs.forward_s.sum() * PERFECT.bf16_flops_per_s == pytest.approx(flops)


def test_backward_takes_two_forwards_of_products_and_two_and_a_half_of_attention():
    short = analytic_costs(request(lengths=((1,),)))
    total = short.backward_s.sum() + short.weight_s.sum()
    assert total / short.forward_s.sum() == pytest.approx(2, rel=1e-3)
    long = analytic_costs(request(lengths=((4 << 20,),)))
    total = long.backward_s.sum() + long.weight_s.sum()
    assert total / long.forward_s.sum() == pytest.approx(2.5, rel=0.03)


def test_rebuilding_costs_a_forward_and_saves_memory():
    kept, products, all_of_it = (
        analytic_costs(request(policy=policy))
        for policy in ("retain", "keep_attention", "recompute")
    )
    assert all_of_it.backward_s - kept.backward_s == pytest.approx(kept.forward_s)
    assert (products.backward_s - kept.backward_s < kept.forward_s).all()
    assert kept.activation_bytes.sum() > products.activation_bytes.sum()
    assert products.activation_bytes.sum() > all_of_it.activation_bytes.sum()


def test_bytes_follow_the_shape():
    costs = analytic_costs(request(num_ranks=4))
    saved = saved_bytes_per_token("retain", MODEL, element_bytes=2)
    assert costs.activation_bytes.sum() == 8192 * MODEL.num_layers * saved
    assert costs.kv_bytes.sum() == 8192 * MODEL.num_layers * 2 * 8 * 64 * 2
    assert costs.kv_gradient_bytes.sum() == 2 * costs.kv_bytes.sum()
    assert costs.message_bytes.tolist() == [tokens * 2048 * 2 for tokens in (4096, 3000, 1096)]
    halved = analytic_costs(request(num_ranks=4, sequence_parallel_degree=2))
    assert halved.activation_bytes.sum() * 2 == costs.activation_bytes.sum()
    assert halved.forward_s.sum() * 2 == pytest.approx(costs.forward_s.sum())


def test_every_parameter_has_one_stage():
    for num_stages in (1, 3, 4):
        stages = layers_of_stages(MODEL.num_layers, num_stages=num_stages)
        assert [layer for stage in stages for layer in stage] == list(range(MODEL.num_layers))
        assert stage_parameters(MODEL, stages=stages).sum() == num_parameters(MODEL)
    assert [len(s) for s in layers_of_stages(10, num_stages=4)] == [3, 3, 2, 2]
    with pytest.raises(ValueError, match="4 layers on 5 stages: every stage needs a layer"):
        layers_of_stages(4, num_stages=5)


def test_short_subsequences_run_less_efficiently():
    hardware = replace(PERFECT, half_efficiency_tokens=256)
    few = analytic_costs(request(hardware=hardware, lengths=((8192,),))).forward_s.sum()
    many = analytic_costs(request(hardware=hardware, lengths=((64,) * 128,))).forward_s.sum()
    assert many > 4 * few


def test_links_know_the_nodes():
    links = analytic_costs(
        request(num_ranks=4, hardware=replace(PERFECT, devices_per_node=2))
    ).links
    assert links.link(0, receiver=1).bytes_per_s == PERFECT.intra_node_bytes_per_s
    assert links.link(1, receiver=2).bytes_per_s == PERFECT.inter_node_bytes_per_s


def test_replicas_reduce_once_per_step():
    assert analytic_costs(request()).reduce_s.sum() == 0
    costs = analytic_costs(request(data_parallel_degree=4))
    moved = num_parameters(MODEL) * 4 * 2 * 3 / 4
    assert costs.reduce_s.sum() == pytest.approx(moved / PERFECT.inter_node_bytes_per_s)


def test_the_papers_ratio_moves_what_a_forward_hides_and_keeps_the_last():
    costs = analytic_costs(CostRequest(MODEL, PRESETS["a100-80g"], ((4096, 2048, 2048),)))
    ratios = hiding_ratios(costs, num_subsequences=[3])
    moved_s = ratios * costs.activation_bytes / costs.copies.d2h_bytes_per_s
    assert (moved_s <= costs.forward_s * (1 + 1e-9)).all()
    assert ratios[0, 2] == 0
    assert 0 < ratios[0, 0] < ratios[0, 1] <= 1


def test_offload_of_a_run_lowers_its_peak_and_hides_when_adaptive():
    def peak_and_step(**activations):
        raw = run_config()
        kept = raw.model_copy(
            update={"activations": raw.activations.model_copy(update=activations)}
        )
        case = simulated_run(kept, shape=RunShape(num_ranks=2)).case
        timeline = simulate(case.schedule, costs=case.costs)
        peak = max(track.memory["total"].peak_bytes for track in timeline.ranks)
        return peak, timeline.makespan_s

    kept, adaptive = peak_and_step(policy="retain"), peak_and_step(policy="sppo")
    everything = peak_and_step(policy="offload_all")
    half = peak_and_step(offload_ratio=0.5)
    assert adaptive[0] < kept[0]
    assert adaptive[1] < 1.05 * kept[1]
    assert everything[1] > adaptive[1]
    assert kept[0] > half[0]


def test_a_run_is_cut_and_replicated_as_it_says():
    run = run_config(train={"sequences_per_step": 2})
    case = simulated_run(run, shape=RunShape(schedule="1f1b", num_ranks=2)).case
    assert case.schedule.lengths == ((65536,), (65536,))
    four = simulated_run(run, shape=RunShape(num_subsequences=4)).case.schedule
    assert [len(parts) for parts in four.lengths] == [4, 4]
    assert four.lengths[0][0] > four.lengths[0][-1]
    cut = run.parallel.model_copy(update={"multiplexed": "on", "data_parallel_degree": 2})
    case = simulated_run(run.model_copy(update={"parallel": cut})).case
    assert (case.schedule.name, case.schedule.num_sequences) == ("sppo_msp", 1)
    assert (case.costs.reduce_s > 0).all()
    uneven = run.parallel.model_copy(update={"data_parallel_degree": 3})
    with pytest.raises(ValueError, match="must be a multiple of the replicas"):
        simulated_run(run.model_copy(update={"parallel": uneven}))


def test_costs_are_positive_and_finite_for_every_machine():
    for hardware in PRESETS.values():
        costs = analytic_costs(request(hardware=hardware, num_ranks=2))
        assert (costs.forward_s > 0).all()
        assert np.isfinite(costs.backward_s).all()
