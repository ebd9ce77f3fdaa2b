"""Shards of each parameter on a rank, and the exchange of tokens, over gloo."""

from math import prod

import pytest
import torch
import torch.distributed as dist

from sppo.cost.candidate import Candidate
from sppo.cost.sharding.heads import tensor_shard
from sppo.cost.sharding.weight_parts import device_parameters, sharded_parameters
from sppo.cost.trainable import Adapter, Trainable
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS
from sppo.parallel.megatron import MegatronSequenceParallel, WeightSharding
from sppo.parallel.mesh_shape import Coordinates, MeshShape
from tests.engine.models import HYBRID, VARIANTS, random_weights, tiny_model
from tests.tiers import each_once

OF_ALL_HEADS = "olmo: post norms, q/k-norm of all heads"
SHARDED = [variant for variant in VARIANTS if variant not in (OF_ALL_HEADS, HYBRID)]


@pytest.mark.parametrize(
    ("variant", "degree", "kv_heads"), each_once(SHARDED, [1, 2, 4, 8], [8, 1, 4, 2, 1])
)
def test_parts_tile_every_parameter(variant, degree, kv_heads):
    sizes = {"num_heads": 8, "head_size": 4, "mlp_size": 24, "num_kv_heads": kv_heads}
    model = tiny_model(variant, **sizes)
    repeats = tensor_shard(model, degree=degree).repeats
    copies = {"stage": degree, "keys": repeats, "block": 1}
    adapted = Trainable(Adapter(rank=3, scale=1.0, layers=(0,)))
    factors = adapted.factor_shapes(model, range(model.num_layers))
    weights = random_weights(model) | {n: torch.randn(shape) for n, shape in factors.items()}
    holders = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    wanted = {}
    for rank in range(degree):
        shares = WeightSharding(model, rank, degree, adapted)
        for name, shape in shares.shapes(range(model.num_layers)).items():
            part = shares.cut(name, weights[name])
            assert tuple(part.shape) == shape
            place = tuple(
                slice(o, o + size) for o, size in zip(shares.offsets(name), shape, strict=True)
            )
            assert torch.equal(part, weights[name][place])
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
            holders[name][place] += 1
            wanted[name] = copies[shares.replica_group(name)]
    assert wanted.keys() == adapted.parameter_shapes(model).keys()
    whole = [f"{part}.lora_a" for part in ("q", "k", "v", "gate", "up")]
    for local in (*whole, "o.lora_b", "down.lora_b"):
        assert wanted.get(f"layers.0.{local}", degree) == degree
    for name, count in wanted.items():
        assert (holders[name] == count).all(), name


def test_ranks_that_hold_the_same_part_are_next_to_each_other_in_every_replica():
    shape = MeshShape(2, 2, 4, key_copies=2)
    at = Coordinates(data=1, pipeline=0, sequence=2)
    assert shape.block_ranks(at) == (2, 10)
    assert shape.block_ranks(at, copies=2) == (2, 3, 10, 11)
    assert shape.block_ranks(at, copies=4) == shape.stage_ranks(at)


@pytest.mark.parametrize(
    ("fields", "degree", "says"),
    [
        ({}, 3, "4 query heads cannot be sharded"),
        ({"num_heads": 12, "num_kv_heads": 4, "head_size": 2}, 6, "divide the 4 key/value heads"),
        ({"mlp_size": 18}, 4, "MLP's width is sharded, and 18 cannot be evenly"),
    ],
)
def test_what_cannot_be_shared_out(fields, degree, says):
    with pytest.raises(ValueError, match=says):
        tensor_shard(tiny_model(**fields), degree=degree)


def narrow_sum(rank):
    exchange = MegatronSequenceParallel(dist.group.WORLD, rank=rank, model=tiny_model())
    summand = torch.full((4, 8), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    return exchange.scatter_sum(summand, (1, 1, 1, 1))


def test_narrow_sums_are_rounded_once(ranks):
    """Added one by one in bf16 the three small ones would be lost."""
    for own in ranks.run(narrow_sum, ranks=4):
        assert own.dtype == torch.bfloat16
        assert (own == 1.0 + 2.0**-7).all()


@pytest.mark.parametrize(
    ("variant", "degree", "kv_heads"), each_once(SHARDED, [1, 2, 4, 8], [8, 1, 4, 2, 1])
)
def test_the_planner_counts_what_the_first_rank_holds(variant, degree, kv_heads):
    sizes = {"num_heads": 8, "head_size": 4, "mlp_size": 24, "num_kv_heads": kv_heads}
    model = tiny_model(variant, num_layers=3, **sizes)
    workload = Workload(
        model,
        PRESETS["a100-80g"],
        sequence_parallel_degree=degree,
        sequence_parallel="megatron",
    )
    candidate = Candidate(workload, (16,), pipeline_parallel_degree=2, data_parallel_degree=3)
    shares = WeightSharding(model, 0, degree)
    repeats = tensor_shard(model, degree=degree).repeats
    copies = {"stage": degree, "keys": repeats, "block": 1}
    held, updated = device_parameters(candidate), sharded_parameters(candidate)
    for stage, layers in enumerate(candidate.stages):
        shapes = shares.shapes(layers)
        assert held[stage] == sum(map(prod, shapes.values()))
        own = sum(
            prod(shape) / copies[shares.replica_group(name)] for name, shape in shapes.items()
        )
        assert updated[stage] == pytest.approx(own / 3)
