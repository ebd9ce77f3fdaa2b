"""Weights gathered and gradients reduced part by part: bytes as executed, seconds as overlapped."""

from collections import Counter
from dataclasses import replace
from math import prod
from unittest import mock

import numpy as np
import pytest

from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_compute_seconds, kv_recompute_seconds
from sppo.cost.parameters import layer_shapes, outer_shapes
from sppo.cost.sharding.collectives import shard_seconds
from sppo.cost.stages.seconds import stage_seconds
from sppo.cost.state_tiers import StateTiers
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS
from sppo.parallel.row_messages import RowMessage
from sppo.planning.run_plan import executed_candidate, plan_run
from tests.make import make_run
from tests.planning.cases import machine, price, run_config
from tests.random_training.emulated_ranks import run_emulated
from tests.training.jobs import execute_step

A100 = PRESETS["a100-80g"]
INSTANT = {"bf16_flops_per_s": 1e30, "fp32_flops_per_s": 1e30, "memory_bytes_per_s": 1e30}


def linked(rate, hardware=A100):
    """The machine with links of so many bytes per second."""
    network = replace(hardware.network, intra_node_bytes_per_s=rate, inter_node_bytes_per_s=rate)
    return replace(hardware, network=network)


def without_compute(rate):
    """A machine on which only collectives take time."""
    hardware = linked(rate, PRESETS["laptop-cpu"])
    points = {"gemm_points": (), "attention_points": (), "elementwise_points": ()}
    return replace(hardware, device=replace(hardware.device, kernel_s=0.0, **INSTANT, **points))


LENGTH = 96
MODEL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 24,
}


def run_of(degrees, *, zero, schedule="sppo", sequences=2, vocab_size=32, **activations):
    data, pipeline, sequence = degrees
    return make_run(
        {**MODEL, "vocab_size": vocab_size},
        length=LENGTH,
        sequence={"num_subsequences": 3, "alignment": 1},
        parallel={
            "data_parallel_degree": data,
            "pipeline_parallel_degree": pipeline,
            "sequence_parallel_degree": sequence,
            "zero": zero,
            "schedule": schedule,
        },
        activations={"policy": "keep_attention", **activations},
        train={"dtype": "fp32", "sequences_per_step": data * sequences},
    )


def executed_bytes(run, hardware):
    """Bytes of whole parts gathered and reduced in a step, on one rank of each pipeline rank."""
    plan = plan_run(run, hardware=hardware, available_bytes=1 << 34)
    sent, parallel = Counter(), run.parallel
    width, stages = parallel.sequence_parallel_degree, parallel.pipeline_parallel_degree

    def counted(method):
        def send(message, *shard):
            group = message._group
            stage = group.ranks[0] // width % stages
            sent[stage] += message.whole.nbytes * (group.rank() == 0)
            method(message, *shard)

        return send

    with (
        mock.patch.object(RowMessage, "gather", counted(RowMessage.gather)),
        mock.patch.object(RowMessage, "reduce", counted(RowMessage.reduce)),
    ):
        ranks = parallel.data_parallel_degree * stages * width
        run_emulated(execute_step, run, plan, ranks=ranks, seed=0)
    return np.array([sent[stage] for stage in range(stages)])


def no_exchange(_workload, _layer_type, *, tokens):
    """Ulysses without its exchanges of tokens for heads."""
    return np.zeros_like(tokens)


@pytest.mark.parametrize(
    ("degrees", "schedule", "vocab_size", "zero"),
    [
        ((2, 1, 1), "sppo", 32, 2),
        ((1, 2, 2), "seq1f1b", 400, 3),
        ((2, 2, 1), "seq_zb_h1", 32, 2),
        pytest.param((2, 2, 1), "sppo", 400, 2, marks=pytest.mark.exhaustive),
        pytest.param((2, 2, 1), "seq_zb_h1", 400, 3, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_priced_bytes_are_those_executed(degrees, schedule, vocab_size, zero):
    """Where only links take time, a stage's seconds are what its collectives carry."""
    hardware = without_compute(1.0)
    run = run_of(degrees, zero=zero, schedule=schedule, vocab_size=vocab_size)
    candidate = replace(executed_candidate(run, hardware=hardware).candidate, schedule=schedule)
    with mock.patch("sppo.cost.layer.exchange_seconds", no_exchange):
        units = stage_seconds(candidate)
    priced = (units.forward + units.backward + units.weight).sum(axis=1)
    sent = executed_bytes(run, hardware)
    share = 1 - 1 / (degrees[0] * degrees[2])
    # A stage's last layer is not gathered twice where its B begins with it, or its next F.
    layer = 4 * sum(map(prod, layer_shapes(run.model, 0).values())) * (zero == 3)
    spared = priced - sent * share
    units_per_step = len(candidate.lengths) * candidate.sequences
    assert (spared >= -1e-6 * priced).all()
    assert (spared <= 2 * units_per_step * layer * share + 1e-6 * priced).all()


def stage_of_three(zero, rate, **change):
    """Seconds of the middle one of three stages: layers alone."""
    model = run_of((1, 1, 1), zero=1).model.model_copy(
        update={"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "mlp_size": 16384}
    )
    model = model.model_copy(update={"num_layers": 6})
    workload = Workload(model, linked(rate), dtype="bf16")
    candidate = Candidate(
        workload,
        (4096, 4096),
        pipeline_parallel_degree=3,
        data_parallel_degree=4,
        zero=zero,
        **change,
    )
    layers = 2 * sum(map(prod, layer_shapes(model, 0).values())) * 3 / 4
    return stage_seconds(candidate), layers


@pytest.mark.parametrize("zero", [2, 3])
def test_recomputing_keys_waits_for_gathers_of_whole_layers(zero):
    model = run_of((1, 1, 1), zero=1).model
    elements = 2 * sum(map(prod, layer_shapes(model, 0).values())) * 3 / 4
    found = {}
    for rate in (1e15, 1e3):
        candidate = Candidate(
            Workload(model, linked(rate), dtype="bf16"),
            (64, 32),
            virtual_stages=2,
            data_parallel_degree=4,
            schedule="looped_bfs",
            kv="recomputed",
            zero=zero,
        )
        found[rate] = kv_recompute_seconds(candidate)
        assert (kv_compute_seconds(candidate) == found[1e15]).all()
    assert (found[1e3][1] == 0).all()  # a rank's last stage retains K and V
    gathered = np.full(2, elements * 2 / 1e3) if zero == 3 else found[1e15][0]
    assert found[1e3][0] == pytest.approx(gathered)


def test_the_longer_of_compute_and_collectives_counts():
    fast, _ = stage_of_three(1, 1e15)
    for zero in (2, 3):
        hidden, _ = stage_of_three(zero, 1e15)
        slow, elements = stage_of_three(zero, 1e8)
        reduction_s, gather_s = elements * 4 / 1e8, elements * 2 / 1e8 * (zero == 3)
        assert hidden.forward[1] == pytest.approx(fast.forward[1])
        # Zeros and sums of whole gradients take some memory traffic.
        whole = [s.backward[1] + s.weight[1] for s in (fast, hidden, slow)]
        assert (whole[0] < whole[1]).all()
        assert whole[1] == pytest.approx(whole[0], rel=0.15)
        assert whole[2] == pytest.approx(reduction_s + gather_s)
        expected = np.full(2, gather_s) if zero == 3 else fast.forward[1]
        assert slow.forward[1] == pytest.approx(expected)


def test_weight_halves_hide_reductions_and_backwards_gathers():
    slow, elements = stage_of_three(3, 1e8, schedule="seq_zb_h1")
    assert slow.backward[1] == pytest.approx(np.full(2, elements * 2 / 1e8))
    assert slow.weight[1] == pytest.approx(np.full(2, elements * 4 / 1e8))


def test_only_the_last_reduction_is_left_for_the_end():
    rate = 1e9
    once, elements = stage_of_three(1, rate)
    assert once.reduce_s[1] == pytest.approx(elements * (4 + 2) / rate)
    assert stage_of_three(3, rate)[0].reduce_s[1] == pytest.approx(elements / 2 * 4 / rate)
    both = stage_of_three(2, rate)[0].reduce_s[1]
    assert both == pytest.approx(elements / 2 * 4 / rate + elements * 2 / rate)


@pytest.mark.parametrize("leaves", [False, True])
def test_between_stages_the_last_reduction_is_hidden_unless_gradients_leave(leaves):
    model = run_of((1, 1, 1), zero=1).model
    candidate = Candidate(
        Workload(model, linked(1e9), dtype="bf16"),
        (64, 32),
        pipeline_parallel_degree=2,
        virtual_stages=2,
        data_parallel_degree=4,
        schedule="looped_bfs",
        zero=3,
        state=StateTiers(gradients="host" if leaves else "device"),
    )
    layer = sum(map(prod, layer_shapes(model, 0).values())) * 3 / 4
    reduce_s = stage_seconds(candidate).reduce_s
    assert reduce_s[1:] == pytest.approx(np.array([1, leaves, leaves]) * layer * 4 / 1e9)


def test_ends_without_room_beside_a_layer_are_exposed():
    """An embedding larger than a layer waits for it, and the next layer waits for the embedding."""
    rate, replicas = 1e9, 4
    found = {}
    for vocab_size in (32, 400):
        model = run_of((1, 1, 1), zero=1, vocab_size=vocab_size).model
        candidate = Candidate(
            Workload(model, linked(rate), dtype="fp32"),
            (48, 48),
            pipeline_parallel_degree=2,
            data_parallel_degree=replicas,
            zero=2,
        )
        units = stage_seconds(candidate)
        alone = stage_seconds(replace(candidate, zero=1))
        added = units.backward + units.weight - alone.backward - alone.weight
        found[vocab_size] = added[0], units.forward[1] - alone.forward[1]
        last = 4 * 3 / 4 / rate
        embedding = prod(outer_shapes(model)["embed.weight"]) * last
        head = embedding + model.hidden_size * last
        layer = sum(map(prod, layer_shapes(model, 0).values())) * last
    traffic = 1e-9
    backward, forward = found[400]
    assert (backward >= embedding + layer).all()
    assert backward == pytest.approx(np.full(2, embedding + layer), rel=0.01, abs=traffic)
    # The first subsequence's head gradients travel behind the second's forward.
    assert forward == pytest.approx([0.0, head], rel=0.01, abs=0.01 * head)
    backward, forward = found[32]
    assert (backward < layer).all()


def test_collectives_of_a_unit_are_all_that_takes_time_on_slow_links():
    network = replace(PRESETS["h100"].network, inter_node_bytes_per_s=1e6)
    hardware = replace(PRESETS["h100"], network=network, num_nodes=4)
    node = replace(hardware.node, num_devices=2)
    candidate = Candidate(
        Workload(run_config("llama-3.2-1b").model, replace(hardware, node=node)),
        (2048, 1024),
        pipeline_parallel_degree=2,
        data_parallel_degree=4,
        schedule="sppo_msp",
        zero=2,
    )
    costs = price(candidate)
    for stage, (_, backward_s) in enumerate(costs.unit_collectives_s):
        found = costs.backward_s[stage] + costs.weight_s[stage]
        assert found == pytest.approx(np.full(2, backward_s), rel=1e-3)
    whole = replace(candidate, schedule="sppo")
    assert price(whole).unit_collectives_s == ()


LINKS = {"intra_node_bytes_per_s": 100.0, "inter_node_bytes_per_s": 10.0}


def ring_seconds(*, data: int, pipeline: int = 1, sequence: int = 1, copies: int = 1) -> float:
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
    assert ring_seconds(**degrees) == pytest.approx(expected)
