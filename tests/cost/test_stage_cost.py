"""Costs by stage and subsequence: the sums are the model's FLOPs and bytes for every partition."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from sppo.activations.policy import saved_bytes_per_token
from sppo.cost.candidate import Candidate, of_ranks
from sppo.cost.flops import (
    BACKWARD_RATIO,
    FLASH_BACKWARD_RATIO,
    head_flops,
    model_flops,
    recomputed_linear_flops,
)
from sppo.cost.kv import kv_bytes_per_token
from sppo.cost.layer import layer_parts, summed
from sppo.cost.layer_kinds import kinds_of_model
from sppo.cost.packed_sequence import parts_of_sequence
from sppo.cost.parameters import layer_shapes, num_parameters
from sppo.cost.sharding.collectives import REDUCE_BUCKET_BYTES, REDUCE_BUCKETS
from sppo.cost.sharding.weight_parts import device_parameters
from sppo.cost.stages.seconds import stage_seconds, weight_operand_bytes
from sppo.cost.state_tiers import StateTiers
from sppo.cost.trainable import EVERYTHING
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS
from sppo.planning.search.evaluation import evaluate_candidate
from tests.planning.cases import A100, PERFECT, machine, price, run_config

MODEL = run_config("llama-3.2-1b").model
PEAK = PERFECT.device.bf16_flops_per_s
LENGTHS = (4096, 3000, 1096)
(KIND,) = kinds_of_model(MODEL, EVERYTHING)


def way(*, hardware=PERFECT, lengths=LENGTHS, sequences=1, model=MODEL, group=1, **change):
    workload = Workload(model, hardware, sequence_parallel_degree=group)
    return Candidate(workload, lengths, sequences=sequences, **change)


def decided(policy, **change):
    return evaluate_candidate(way(policy=policy, **change))


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_on_a_perfect_machine_forward_is_the_models_flops(num_ranks):
    """The last stage also forms the loss, and with it both gradients of the head."""
    costs = price(way(pipeline_parallel_degree=num_ranks))
    flops = model_flops(MODEL, start=0, end=8192)[0] + head_flops(MODEL)[1] * 8192
    assert costs.forward_s.sum() * PEAK == pytest.approx(flops)


def test_on_a_perfect_machine_backward_takes_two_of_products_and_two_and_a_half_of_attention():
    def seconds(tokens):
        costs = price(way(lengths=(tokens,)))
        head = sum(head_flops(MODEL)) * tokens / PEAK
        return costs.forward_s.sum() - head, costs.backward_s.sum() + costs.weight_s.sum()

    forward, backward = seconds(1)
    assert backward / forward == pytest.approx(BACKWARD_RATIO, rel=1e-3)
    forward, backward = seconds(64 << 20)
    assert backward / forward == pytest.approx(FLASH_BACKWARD_RATIO, rel=1e-2)


def test_recomputing_costs_its_flops_and_saves_memory():
    retained, linear, both = (
        decided(policy).costs for policy in ("retain", "keep_attention", "recompute")
    )
    each = recomputed_linear_flops(MODEL, KIND)
    products = MODEL.num_layers * each * np.array(LENGTHS) / PEAK
    assert (linear.backward_s - retained.backward_s)[0] == pytest.approx(products)
    attention = (both.backward_s - linear.backward_s)[0] * PEAK
    per_token = (model_flops(MODEL, start=0, end=8192)[0] - _linear_flops(8192)) / 8192
    assert attention.sum() / 8192 == pytest.approx(per_token)
    assert (both.backward_s - retained.backward_s < retained.forward_s).all()
    held = [costs.activation_bytes.sum() for costs in (retained, linear, both)]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == 3


def _linear_flops(tokens):
    """Forward FLOPs that do not grow with the context."""
    return tokens * (model_flops(MODEL, start=0, end=1)[0] - 4 * 2048 * MODEL.num_layers)


def test_bytes_follow_the_shape():
    costs = price(way(pipeline_parallel_degree=4))
    saved = saved_bytes_per_token("retain", MODEL, layers=range(MODEL.num_layers), element_bytes=2)
    assert costs.activation_bytes.sum() == 8192 * saved
    assert costs.kv_bytes.sum() == 8192 * MODEL.num_layers * 2 * 8 * 64 * 2
    assert costs.kv_gradient_bytes.sum() == 2 * costs.kv_bytes.sum()
    assert costs.message_bytes.tolist() == [tokens * 2048 * 2 for tokens in LENGTHS]


def test_a_group_shares_out_bytes_and_work():
    alone, shared = (
        price(
            way(
                hardware=machine(PERFECT, intra_node_bytes_per_s=1e30, intra_node_latency_s=0.0),
                pipeline_parallel_degree=4,
                group=group,
            )
        )
        for group in (1, 2)
    )
    for name in ("activation_bytes", "kv_bytes", "message_bytes", "weight_bytes"):
        assert getattr(shared, name).sum() * 2 == getattr(alone, name).sum()
    for name in ("forward_s", "backward_s", "weight_s"):
        assert getattr(shared, name) * 2 == pytest.approx(getattr(alone, name))


@pytest.mark.parametrize(("mechanism", "ratio"), [("ulysses", 1.0), ("megatron", 1.5)])
def test_backward_exchanges_as_much_or_more(mechanism, ratio):
    """Megatron gathers the normed inputs again, which nobody has saved."""
    free = machine(PERFECT, intra_node_bytes_per_s=1e30, intra_node_latency_s=0.0)
    added = []
    for name in ("forward_s", "backward_s"):
        asked = [way(hardware=hardware, group=2) for hardware in (free, PERFECT)]
        workloads = [replace(each.workload, sequence_parallel=mechanism) for each in asked]
        with_free, with_links = (
            getattr(price(replace(each, workload=workload)), name)
            for each, workload in zip(asked, workloads, strict=True)
        )
        added.append(with_links - with_free)
    assert added[1] == pytest.approx(ratio * added[0])


def test_more_devices_than_key_heads_repeat_them():
    widths = [kv_bytes_per_token(way(group=group).workload)[0] for group in (1, 4, 8, 16, 32)]
    assert widths == [widths[0], widths[0] / 4, *[widths[0] / 8] * 3]


def test_every_parameter_has_one_stage():
    for num_ranks in (1, 3, 4):
        asked = way(pipeline_parallel_degree=num_ranks)
        assert [n for stage in asked.stages for n in stage] == list(range(MODEL.num_layers))
        # The last of several stages projects with its own copy of the embedding.
        copied = MODEL.vocab_size * MODEL.hidden_size if num_ranks > 1 else 0
        assert device_parameters(asked).sum() == num_parameters(MODEL) + copied


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_weight_gradient_costs_reading_and_writing_its_fp32_sum(dtype):
    """8 bytes a weight and subsequence: no half-precision product goes through memory."""
    rate = 1e12
    device = replace(PERFECT.device, memory_bytes_per_s=rate)
    slower = replace(PERFECT, device=device)
    seconds = [
        summed(
            layer_parts(
                Workload(MODEL, hardware, dtype=dtype), parts_of_sequence((1024,)), kind=KIND
            )["weight"]
        )[0]
        for hardware in (slower, PERFECT)
    ]
    matrices = sum(prod(shape) for shape in layer_shapes(MODEL, 0).values() if len(shape) == 2)
    assert seconds[0] - seconds[1] == pytest.approx(8 * matrices / rate, rel=1e-3)


def test_links_know_the_nodes():
    network = PERFECT.network
    links = price(way(pipeline_parallel_degree=4, hardware=machine(PERFECT, num_devices=2))).links
    assert links.link(0, receiver=1).bytes_per_s == network.intra_node_bytes_per_s
    assert links.link(1, receiver=2).bytes_per_s == network.inter_node_bytes_per_s
    assert links.link(1, receiver=0).latency_s == network.intra_node_latency_s
    wide = price(
        way(pipeline_parallel_degree=4, group=2, hardware=machine(PERFECT, num_devices=2))
    ).links
    assert wide.link(0, receiver=1).bytes_per_s == network.inter_node_bytes_per_s


def test_replicas_reduce_once_per_step():
    reduced = [
        stage_seconds(way(data_parallel_degree=replicas)).reduce_s.sum() for replicas in (1, 4)
    ]
    # Sums in fp32 go to the ranks that update them, weights in bf16 come back.
    sent = num_parameters(MODEL) * (4 + 2) * 3 / 4
    assert reduced == [0, pytest.approx(sent / PERFECT.network.intra_node_bytes_per_s)]
    by_zero = {
        zero: stage_seconds(way(data_parallel_degree=4, zero=zero)).reduce_s.sum()
        for zero in (0, 3)
    }
    # After each use of a part there is no room for the embedding's to be left at the end (ZeRO-3).
    assert by_zero == {0: pytest.approx(reduced[1] * 8 / 6), 3: 0.0}
    twice = way(data_parallel_degree=4, sequences=2)
    assert stage_seconds(twice).reduce_s.sum() == reduced[1]
    assert price(twice).forward_s.sum() == pytest.approx(2 * price(way()).forward_s.sum())


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize(("zero", "reduced", "gathered"), [(0, 8, 0), (1, 4, 2)])
def test_a_rank_waits_for_reductions_behind_each_stage_and_for_gathers_at_the_end(
    zero, reduced, gathered, leave
):
    """Whatever stands between two of its stages holds up the next one, but the last buckets.

    Gradients that leave the device wait for all of them.
    """
    two = way(
        model=MODEL.model_copy(update={"num_layers": 4, "mlp_size": 32768}),
        pipeline_parallel_degree=2,
        virtual_stages=2,
        schedule="looped_bfs",
        data_parallel_degree=4,
        zero=zero,
        state=StateTiers(gradients="host", optimizer="host") if leave else StateTiers(),
    )
    rate, away = PERFECT.network.intra_node_bytes_per_s, 3 / 4
    parameters = device_parameters(two)
    beside = 0 if leave else REDUCE_BUCKETS * REDUCE_BUCKET_BYTES
    assert (parameters * 4 > 2 * beside).all()
    at_reduce = (parameters * 4 - [0, 0, beside, beside]) * (reduced / 4)
    at_end = gathered * of_ranks(two, parameters)
    expected = (at_reduce + [*at_end, 0, 0]) * away / rate
    assert stage_seconds(two).reduce_s == pytest.approx(expected)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_replicas_share_out_the_update(zero):
    alone, four = (
        stage_seconds(way(hardware=A100, zero=zero, data_parallel_degree=replicas)).update_s.sum()
        for replicas in (1, 4)
    )
    assert alone == pytest.approx(four * (4 if zero else 1))


def test_a_tier_that_is_not_there_copies_nothing():
    without = machine(host_memory_bytes=0, d2h_bytes_per_s=0.0, h2d_bytes_per_s=0.0)
    assert price(way(hardware=without)).copies.d2h_bytes_per_s == float("inf")
    disk = PRESETS["laptop-cpu"]
    assert price(way(hardware=disk)).copies.d2h_bytes_per_s == disk.node.disk_write_bytes_per_s
    four = machine(disk, num_devices=4)
    assert price(way(hardware=four)).copies.h2d_bytes_per_s * 4 == disk.node.disk_read_bytes_per_s


@pytest.mark.parametrize(
    ("preset", "schedule", "copies"),
    [
        ("laptop-cpu", "seq_zb_h1", True),
        ("h100", "seq_zb_h1", False),
        ("laptop-cpu", "sppo", False),
    ],
)
def test_only_a_cpu_copies_operands_of_deferred_weight_gradients(preset, schedule, copies):
    plain = way(hardware=PRESETS[preset], pipeline_parallel_degree=2)
    one, other = (stage_seconds(replace(plain, schedule=name)) for name in ("sppo", schedule))
    assert (one.forward == other.forward).all()
    assert (one.backward == other.backward).all()
    rate = PRESETS[preset].device.memory_bytes_per_s
    expected = 2 * weight_operand_bytes(plain) / rate * copies
    assert other.weight - one.weight == pytest.approx(expected)
