"""Blocks of offloaded tensors, their extents and ring slots, as a run uses them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.activations.block_layout import (
    BLOCK_ALIGNMENT_BYTES,
    PREFETCH_LAYERS,
    BlockLayout,
    packed_bytes,
    packed_offsets,
)
from sppo.activations.placement import ActivationPlacement
from sppo.activations.subsequence_placement import planned_placement
from sppo.activations.tensor_classes import ATTENTION, LINEAR, X_IN, tensor_bytes_per_token
from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.live_sets.working_set import working_sets
from sppo.cost.memory.copy_room import stage_blocks
from sppo.cost.memory.unit_working_sets import block_layout, joined_bytes
from sppo.engine.engine import Engine
from sppo.engine.pipeline import Pipeline
from sppo.engine.unit import SequenceData
from sppo.hardware.presets import PRESETS
from sppo.hardware.this_machine import has_half_products
from sppo.model.gradients import zero_gradients
from sppo.model.initialize import initial_weights
from sppo.offload.block_store import BlockStore
from sppo.offload.lane import Lane
from sppo.planning.run_plan import plan_run
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.units import MIB
from tests.cost.pool import peak_of_step
from tests.engine.offloading import with_offsets
from tests.planning.cases import run_config

LAPTOP = PRESETS["laptop-cpu"]
PLENTY = 1 << 44


def run_of(*, length=8192, pieces=8, **activations):
    return run_config(
        "tiny",
        length=length,
        sequence={"num_subsequences": pieces},
        activations={"disk": "spill", **activations},
        parallel={"virtual_stages": 1},
        hardware="auto",
    )


def plan(run):
    return plan_run(run, hardware=LAPTOP, available_bytes=PLENTY, disk_bytes=PLENTY)


def shape_of(model, **options):
    return BlockLayout(model, layers=range(model.num_layers), element_bytes=2, **options)


def blocks_of(shape, rows, *, attention_saved=True):
    """Size of the block of each layer of one subsequence."""
    found = shape.blocks(np.array([rows]), attention_saved=np.array([attention_saved]))
    return found[0].tolist()


def test_tensors_are_packed_one_behind_the_other():
    offsets, size = packed_offsets({"x_in": 100, "lse": 64, "o": 1})
    assert offsets == {"x_in": 0, "lse": 128, "o": 192}
    assert size == BLOCK_ALIGNMENT_BYTES == packed_bytes([100, 64, 1])
    assert packed_offsets({}) == ({}, 0)
    assert packed_bytes([]) == 0
    assert packed_bytes([4096, 1]) == 8192


@settings(max_examples=30)
@given(st.tuples(*[st.integers(0, 500)] * 3), st.integers(1, 4), st.integers(1, 3))
def test_a_block_holds_the_rows_of_its_classes(rows, every, shard_count):
    model = run_of().model
    shape = shape_of(model, input_every=every, shard_count=shard_count)
    sizes = tensor_bytes_per_token(model, model.layer_type(0), element_bytes=2)
    found = blocks_of(shape, rows)
    assert len(found) == model.num_layers
    for layer, size in enumerate(found):
        own = rows if layer % every == 0 else (0, *rows[1:])
        wanted = own[0] * sizes["x_in"] + own[1] * (sizes["o"] + sizes["lse"])
        rest = set(sizes) - {"x_in", "o", "lse"}
        wanted += own[2] * sum(sizes[name] for name in rest)
        assert wanted / shard_count <= size
        assert size <= wanted / shard_count + shape.most_padding_bytes + len(sizes)
        assert size % BLOCK_ALIGNMENT_BYTES == 0
    # A layer that must recompute attention needs its own input.
    if every > 1 and rows[0]:
        assert len(set(blocks_of(shape, rows, attention_saved=False))) == 1


@pytest.mark.parametrize("policy", ["offload_all", "sppo"])
def test_places_lie_one_behind_the_other_and_fill_the_file(policy):
    found = plan(run_of(policy=policy))
    (stage,) = found.stages
    shape, end = shape_of(found.model), 0
    for part in stage.subsequences:
        assert part.slot_offset_bytes == end
        end += sum(blocks_of(shape, part.offloaded, attention_saved=part.attention_saved))
    assert stage.memory.tier_activations_bytes == end > 0
    assert found.predicted.disk_peak_bytes == end
    largest = max(blocks_of(shape, stage.subsequences[0].offloaded))
    layers = found.model.num_layers
    # On a CPU the slots of blocks that leave are on the device, beside those that come back.
    assert stage.memory.device.copies_bytes == (layers + 3) * largest
    assert found.predicted.host_peak_bytes == 0


@pytest.mark.parametrize("every", [1, 3, 99])
def test_what_is_cut_has_room_to_be_put_together(every):
    """Of all layers that share an input at once, up to those there are."""
    found = plan(run_of(offload_ratio=0.5, input_every=every))
    (stage,) = found.stages
    part, tokens = stage.subsequences[0], found.lengths[0]
    assert 0 < part.offloaded[LINEAR] < tokens
    sizes = tensor_bytes_per_token(found.model, found.model.layer_type(0), element_bytes=2)
    linear = tokens * (sum(sizes.values()) - sizes["x_in"] - sizes["o"] - sizes["lse"])
    shape = shape_of(found.model, input_every=every)
    at_once = min(every, found.model.num_layers)
    slots = found.model.num_layers + 2 + at_once
    device = stage.memory.device
    assert device.copies_bytes == slots * max(blocks_of(shape, part.offloaded))
    whole = plan(run_of(policy="offload_all", input_every=every)).stages[0].memory.device
    assert device.working_bytes - whole.working_bytes == at_once * linear


def test_a_cut_input_is_put_together_once():
    """The layers that share it recompute it, which their working set counts."""
    found = plan(run_of(length=65536, offload_ratio=0.05, input_every=4))
    (stage,) = found.stages
    assert 0 < stage.subsequences[0].offloaded[X_IN] < found.lengths[0]
    whole = plan(run_of(length=65536, policy="offload_all", input_every=4)).stages[0]
    x_in = found.lengths[0] * found.model.hidden_size * 2
    assert stage.memory.device.working_bytes == whole.memory.device.working_bytes + x_in


def rows_cut_by(fate, tensor_class):
    """(retained, offloaded, recomputed) of 512 tokens, half of one class kept and half with another
    fate."""
    rows = [[512, 512, 512], [0, 0, 0], [0, 0, 0]]
    rows[0][tensor_class] = rows[fate][tensor_class] = 256
    return tuple(map(tuple, rows))


@pytest.mark.parametrize(
    ("fate", "tensor_class", "every"),
    [
        (1, X_IN, 1),
        (1, LINEAR, 1),
        (2, ATTENTION, 4),
        pytest.param(1, ATTENTION, 4, marks=pytest.mark.exhaustive),
        pytest.param(2, LINEAR, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_cut_tensors_take_the_memory_that_is_predicted(fate, tensor_class, every, tmp_path):
    """Peak of a step beyond what outlives it, after a first step that builds what stays."""
    sizes = {"hidden_size": 256, "num_heads": 4, "mlp_size": 704, "num_layers": 4}
    model = run_config({"vocab_size": 512, **sizes}).model
    rows = rows_cut_by(fate, tensor_class)
    weights = {name: w.bfloat16() for name, w in initial_weights(model, seed=0).items()}
    placed = with_offsets(model, [rows] * 2, element_bytes=2, input_every=every)
    engine = Engine(
        model,
        weights=weights,
        gradients=zero_gradients(weights),
        pipeline=Pipeline(placements={0: planned_placement(placed)}, input_every=every),
        offloaded=BlockStore(Lane(), disk=tmp_path, source_lag=0),
    )
    tokens = torch.arange(1025) % 512
    seen = peak_of_step(engine, SequenceData(tokens[:-1], tokens[1:]), (0, 512, 1024))
    engine.close()
    placement = ActivationPlacement(*(np.array([[part] * 2]) for part in rows))
    # With products in half precision as on this machine.
    device = replace(LAPTOP.device, half_products=has_half_products())
    moments = working_sets(
        Workload(model, replace(LAPTOP, device=device)),
        tokens=512,
        prefix=512,
        recomputed=frozenset((tensor_class,) if fate == 2 else ()),
        input_every=every,
        layers=4,
    )
    joined = joined_bytes(placement, shape_of(model, input_every=every), stage=0).max()
    predicted = max(live_bytes for _, live_bytes in moments) + joined
    assert seen <= predicted + MIB // 4
    # Of the layer in backward, what is used early is gone at the worst moment.
    assert seen >= 0.65 * predicted


@pytest.mark.parametrize("every", [1, 3, 99])
def test_every_device_has_the_ring_that_a_run_takes(every):
    """Two layers ahead of those that are taken at once; sources on their way out are torch's."""
    model = run_config("gpt-7b").model
    candidate = Candidate(
        Workload(model, PRESETS["h100"]),
        lengths=(1024,) * 2,
        offload_ratio=1.0,
        input_every=every,
    )
    found = evaluate_candidate(candidate)
    blocks = stage_blocks(found.placement, block_layout(candidate, stage=0), stage=0)
    ring = PREFETCH_LAYERS + min(every, model.num_layers)
    held = found.memory[0]
    assert held.device.copies_bytes == ring * max(blocks[0])
    assert held.tier_activations_bytes == sum(blocks[0])
