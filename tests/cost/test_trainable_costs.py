"""FLOPs and seconds of steps with frozen weights and adapters, against those of full training."""

from __future__ import annotations

from dataclasses import fields, replace
from math import prod

import numpy as np
import pytest

from sppo.cost.candidate import Candidate
from sppo.cost.flops import head_flops, model_flops, partition_costs, step_flops
from sppo.cost.layer import layer_parts
from sppo.cost.layer_kinds import kinds_of_model
from sppo.cost.packed_sequence import parts_of_sequence
from sppo.cost.parameters import layer_shapes, num_parameters
from sppo.cost.stages.seconds import stage_seconds, streamed_bytes, weight_operand_bytes
from sppo.cost.stages.stage_cost import costs_without_activations
from sppo.cost.state_tiers import StateTiers
from sppo.cost.trainable import EVERYTHING, Adapter, Trainable
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS
from sppo.planning.explain import rates_used
from sppo.planning.search.evaluation import evaluate_candidate
from tests.planning.cases import PERFECT, machine, run_config, solved

MODEL = run_config("llama-3.2-1b").model
LENGTHS = (4096, 3000, 1096)
LORA = Trainable(Adapter(16, 1.0), ())
ADAPTERS = {
    "all projections": LORA,
    "attention": Trainable(Adapter(8, 2.0, ("q", "k", "v", "o")), ()),
    "upper layers": Trainable(Adapter(64, 1.0, layers=(8, 12, 13)), ()),
    "norms, too": Trainable(Adapter(16, 1.0), ("*norm.*",)),
    "two layers without adapters": Trainable(None, ("layers.1[45].*",)),
    "head": Trainable(None, ("head.*", "final_norm.*")),
}


def way(trainable, *, hardware=PRESETS["h100"], **change):
    return Candidate(Workload(MODEL, hardware, trainable=trainable), LENGTHS, **change)


def numbers(costs):
    return {
        field.name: np.asarray(getattr(costs, field.name))
        for field in fields(costs)
        if isinstance(getattr(costs, field.name), np.ndarray)
    }


@pytest.mark.parametrize("schedule", ["sppo", "seq_zb_h1"])
def test_what_trains_everything_by_globs_costs_as_much_as_full_training(schedule):
    whole = Trainable(Adapter(16, 1.0, targets=()), ("*",))
    change = {"pipeline_parallel_degree": 4, "data_parallel_degree": 2, "schedule": schedule}
    full, found = (costs_without_activations(way(each, **change)) for each in (EVERYTHING, whole))
    for name, table in numbers(full).items():
        assert (numbers(found)[name] == table).all(), name
    assert step_flops(MODEL, whole, length=99, sequences=2) == step_flops(
        MODEL, length=99, sequences=2
    )


def test_model_flops_of_adapters_by_hand():
    """Frozen weights count 4 FLOPs a token, factors 6, and nothing is behind layer 8 but these."""
    trainable = ADAPTERS["upper layers"]
    shapes = layer_shapes(MODEL, 0).values()
    weights = sum(prod(shape) for shape in shapes if len(shape) == 2)
    factors = sum(64 * sum(shape) for shape in shapes if len(shape) == 2)
    head, pairs, tokens = MODEL.vocab_size * MODEL.hidden_size, 4096 * 4097 // 2, 4096
    forward, backward = model_flops(MODEL, trainable, start=0, end=tokens)
    attention = 4 * MODEL.num_heads * MODEL.head_dim * pairs
    assert forward == 2 * tokens * (16 * weights + 3 * factors + head) + 16 * attention
    assert backward == 2 * tokens * (8 * weights + 6 * factors + head) + 2 * 8 * attention
    both = step_flops(MODEL, trainable, length=tokens, sequences=3)
    assert both == 3 * (forward + backward)


@pytest.mark.parametrize("trainable", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_on_a_perfect_machine_a_step_is_its_flops(trainable):
    """Beside them, a backward computes the inputs of the factors B again, and flash 2.5 of 2."""
    asked = way(trainable, hardware=PERFECT, pipeline_parallel_degree=4)
    costs = costs_without_activations(asked)
    found = (costs.forward_s + costs.backward_s + costs.weight_s).sum()
    expected = step_flops(MODEL, trainable, length=sum(LENGTHS), sequences=1)
    adapters = trainable.factor_shapes(MODEL, range(MODEL.num_layers))
    again = sum(prod(shape) for name, shape in adapters.items() if name.endswith("lora_a"))
    flash = 0.5 * 4 * MODEL.num_heads * MODEL.head_dim * sum(LENGTHS) * (sum(LENGTHS) + 1) / 2
    expected += 2 * again * sum(LENGTHS) + flash * asked.backward_layers.sum()
    assert found * PERFECT.device.bf16_flops_per_s == pytest.approx(expected)


def test_steps_of_adapters_are_faster_and_grow_with_their_rank():
    adapters = (Trainable(Adapter(rank, 1.0), ()) for rank in (1, 16, 64, 256))
    asked = [stage_seconds(way(each)) for each in (*adapters, EVERYTHING)]
    seconds = [float((own.forward + own.backward + own.weight).sum()) for own in asked]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == 5
    assert 0.7 < seconds[1] / seconds[-1] < 0.95


def test_thin_products_take_the_time_of_their_wide_operands():
    """Seven projections, rank 1: in forward each reads x, and reads and writes y."""
    rate = 1e9
    slow = replace(PERFECT, device=replace(PERFECT.device, memory_bytes_per_s=rate))
    one = Trainable(Adapter(1, 1.0), ())
    thin, none = (
        stage_seconds(way(each, hardware=slow)).forward
        for each in (one, Trainable(None, ("layers.0.q.weight",)))
    )
    wide = sum(
        shape[1] + 2 * shape[0] for shape in layer_shapes(MODEL, 0).values() if len(shape) == 2
    )
    expected = MODEL.num_layers * wide * 2 * np.array(LENGTHS) / rate
    assert thin - none == pytest.approx(expected[None, :], rel=1e-6)


def test_layers_below_what_trains_have_a_forward_alone():
    asked = way(ADAPTERS["upper layers"], pipeline_parallel_degree=4, schedule="seq_zb_h1")
    assert asked.forward_only_stages == 2
    assert asked.backward_layers.tolist() == [0, 0, 4, 4]
    costs = costs_without_activations(asked)
    for name in ("backward_s", "weight_s", "operand_bytes", "kv_gradient_bytes"):
        table = getattr(costs, name)
        assert not table[:2].any(), name
        assert table[2:].all(), name
    full = costs_without_activations(way(EVERYTHING, pipeline_parallel_degree=4))
    assert costs.forward_s[:2] == pytest.approx(full.forward_s[:2])


def test_weight_halves_of_adapters_are_small():
    change = {"pipeline_parallel_degree": 4, "schedule": "seq_zb_h1"}
    seconds = stage_seconds(way(LORA, **change))
    assert (seconds.weight < 0.1 * seconds.backward).all()
    full, adapted = (weight_operand_bytes(way(each, **change)) for each in (EVERYTHING, LORA))
    # The same wide operands as those of the weights, and two of the rank for each projection.
    layers = way(LORA, **change).sums_over_layers(lambda kind: 1)
    assert adapted - full == pytest.approx(layers[:, None] * LENGTHS * (7 * 2 * 16 * 2))


def test_only_gradients_of_what_trains_are_sent_back():
    full, adapted = (costs_without_activations(way(each)) for each in (EVERYTHING, LORA))
    factors = sum(16 * sum(shape) for shape in layer_shapes(MODEL, 0).values() if len(shape) == 2)
    assert adapted.weight_gradient_bytes.tolist() == [MODEL.num_layers * factors * 4]
    assert adapted.weight_bytes - full.weight_bytes == MODEL.num_layers * factors * 2


def test_tokens_weigh_less_beside_pairs_with_frozen_weights():
    linear, quadratic = partition_costs(MODEL)
    adapted, same = partition_costs(MODEL, Trainable(Adapter(1, 1.0), ()))
    assert same == quadratic
    assert adapted == pytest.approx(linear * 2 / 3, rel=2e-3)


def test_a_frozen_head_has_no_weight_gradient():
    tied = Trainable(Adapter(16, 1.0), ("embed.*",))
    assert MODEL.tie_embeddings
    assert head_flops(MODEL, tied) == head_flops(MODEL)
    assert 2 * sum(head_flops(MODEL, LORA)) * 3 == 2 * sum(head_flops(MODEL)) * 2


def test_replicas_reduce_gather_and_update_what_trains():
    node = machine(PERFECT, num_devices=16)
    change = {"hardware": node, "data_parallel_degree": 4, "pipeline_parallel_degree": 4}
    trainable = ADAPTERS["upper layers"]
    asked = way(trainable, **change)
    seconds = stage_seconds(asked)
    in_a_layer = sum(
        64 * sum(shape) for shape in layer_shapes(MODEL, 0).values() if len(shape) == 2
    )
    trained = in_a_layer * np.array([0, 0, 1, 2])  # layers 8, 12, 13 of four a stage
    rate = PERFECT.network.intra_node_bytes_per_s
    assert seconds.reduce_s == pytest.approx(trained * (4 + 2) * 3 / 4 / rate)
    slow = replace(PERFECT, device=replace(PERFECT.device, memory_bytes_per_s=1e9))
    for zero, shared in ((0, 1), (1, 4)):
        own = stage_seconds(way(trainable, **{**change, "hardware": slow}, zero=zero)).update_s
        assert own == pytest.approx(trained / shared * (11 * 4 + 2 + 4) / 1e9, rel=0.1)


def test_whole_weights_are_gathered_and_gradients_of_what_trains_are_reduced():
    """ZeRO-3 on links so slow that collectives hide all compute."""
    slow = machine(PERFECT, intra_node_bytes_per_s=1e6)
    costs = [
        stage_seconds(way(each, hardware=slow, data_parallel_degree=2, zero=3))
        for each in (EVERYTHING, Trainable(None, ("layers.1?.q.weight",)))
    ]
    layer = sum(map(prod, layer_shapes(MODEL, 0).values()))
    outer = MODEL.vocab_size * MODEL.hidden_size
    sent = 1 / 2 / 1e6
    # Six layers have a backward, and each gathers its weights (2 bytes), and reduces q (4 bytes).
    backward = 6 * (2 * layer + 4 * MODEL.hidden_size**2) * sent
    assert costs[1].backward == pytest.approx(backward, rel=1e-3)
    gathers = 2 * (16 * layer + 2 * outer) * sent
    assert costs[1].forward == pytest.approx(gathers, rel=1e-3)
    assert costs[0].backward[0, 0] > 16 * 6 * layer * sent


def test_weights_stream_whole_and_gradients_if_they_train():
    state = StateTiers(weights="host", gradients="host", optimizer="host")
    weights, gradients = streamed_bytes(way(ADAPTERS["upper layers"], state=state))
    factors = sum(64 * sum(shape) for shape in layer_shapes(MODEL, 0).values() if len(shape) == 2)
    assert weights == 2 * (num_parameters(MODEL) + 3 * factors)
    assert gradients == 4 * 3 * factors


@pytest.mark.parametrize("trainable", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_rates_are_the_peak_on_a_perfect_machine(trainable):
    """The seconds of products and of attention have the FLOPs that are executed."""
    products, attention, *_ = rates_used(
        evaluate_candidate(way(trainable, hardware=PERFECT, policy="recompute"))
    )
    assert products.value == pytest.approx(PERFECT.device.bf16_flops_per_s)
    assert attention.value == pytest.approx(PERFECT.device.bf16_flops_per_s)


@pytest.mark.parametrize("targets", [("q", "up"), ("o", "down")])
def test_every_device_of_megatron_multiplies_all_tokens_with_whole_factors(targets):
    """A beside weights that are sharded by rows, and B beside those by columns."""
    links = {"intra_node_bytes_per_s": 1e30, "intra_node_latency_s": 0.0}
    alone = way(Trainable(Adapter(16, 1.0, targets), ()), hardware=machine(PERFECT, **links))
    four = replace(alone.workload, sequence_parallel_degree=4, sequence_parallel="megatron")
    own, one = (stage_seconds(each).weight.sum() for each in (replace(alone, workload=four), alone))
    # Of both targets together, the whole factors have 2 E columns or rows, the others E + F.
    whole, sharded = 2 * MODEL.hidden_size, MODEL.hidden_size + MODEL.mlp_size
    assert 4 * own / one == pytest.approx((4 * whole + sharded) / (whole + sharded))


def test_a_solver_puts_off_weight_halves_of_full_training_alone():
    """Adapters have next to none, so zero-bubble orders have nothing to fill bubbles with."""
    degrees = {"pipeline_parallel_degree": 4, "sequence_parallel_degree": 1, "virtual_stages": 1}
    full, adapted = (
        solved(
            run_config(
                "llama-3.2-1b",
                length=16384,
                train={"sequences_per_step": 2},
                parallel={**degrees, "multiplexed": "off"},
                hardware={"preset": "h100", "devices_per_node": 4},
                adapter=adapter,
            )
        ).best
        for adapter in (None, {"rank": 16})
    )
    assert (full.candidate.schedule, adapted.candidate.schedule) == ("seq_zb_h1", "sppo")
    assert adapted.step_s < 0.9 * full.step_s


def test_adapters_launch_kernels_in_place_of_those_of_frozen_weights():
    """In forward two products and a scaling; in backward four, u again, and another scaling."""
    slow, counts = replace(PERFECT, device=replace(PERFECT.device, kernel_s=1.0)), []
    for trainable in (EVERYTHING, LORA):
        (layer,) = kinds_of_model(MODEL, trainable)
        workload = Workload(MODEL, slow, trainable=trainable)
        parts = layer_parts(workload, parts_of_sequence((1024,)), kind=layer)
        counts.append([parts[name]["launches"][0] for name in ("forward", "backward")])
    (forward, backward), adapted = counts
    assert adapted == [forward + 7 * 3, backward - 7 + 7 * 7]
