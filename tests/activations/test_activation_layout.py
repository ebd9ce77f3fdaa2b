"""Positions of the blocks of offloaded activations in the tier, and the order of their use."""

from __future__ import annotations

from itertools import pairwise

from sppo.activations.activation_layout import (
    ActivationKey,
    ActivationLayout,
    offload_schedule,
    order_of_use,
)
from sppo.activations.block_layout import BLOCK_ALIGNMENT_BYTES, BlockLayout
from sppo.activations.policy import saved_bytes_per_token
from sppo.activations.subsequence_placement import SubsequencePlacement
from sppo.config.model import ModelConfig
from sppo.config.model.presets import PRESETS
from sppo.schedule.program_text import parse_action

LAYERS = range(3, 6)
ROWS = ((0, 0, 0), (64, 40, 0), (10, 64, 64))
"""Offloaded of each subsequence of 64 tokens: nothing, a part, more."""


def layout(sequences, *, layers=LAYERS, **options):
    model = ModelConfig(**{**PRESETS["tiny-test"], "vocab_size": 32, "num_layers": 8})
    shards = {
        (sequence, index): (
            SubsequencePlacement(
                retained=tuple(64 - count for count in rows), offloaded=rows, recomputed=(0, 0, 0)
            ),
        )
        for sequence in range(sequences)
        for index, rows in enumerate(ROWS)
    }
    blocks = BlockLayout(model, layers=layers, element_bytes=4)
    return ActivationLayout(blocks, shards, **options)


def test_blocks_of_a_sequence_lie_one_behind_the_other():
    stage = layout(1)
    order = [key for index in (2, 1, 0) for key in stage.saved_keys((0, index))]
    found = offload_schedule([stage], order=order)
    extents = [
        found.extents[ActivationKey(0, index, layer)] for index in range(3) for layer in LAYERS
    ]
    assert [extent.size_bytes for extent in extents[:3]] == [0, 0, 0]
    assert all(extent.size_bytes >= BLOCK_ALIGNMENT_BYTES for extent in extents[3:])
    assert extents[0].offset_bytes == 0
    for before, after in pairwise(extents):
        assert before.offset_bytes + before.size_bytes == after.offset_bytes
        assert after.offset_bytes % BLOCK_ALIGNMENT_BYTES == 0
    assert found.tier_bytes == sum(extent.size_bytes for extent in extents)
    assert [*found.order] == [
        ActivationKey(0, index, layer) for index in (2, 1, 0) for layer in (5, 4, 3)
    ]


def test_sequences_in_flight_have_room_of_their_own_and_later_ones_use_it_again():
    extents = layout(3, sequences_in_flight=2).extents()
    ends = {
        sequence: max(sum(extent) for key, extent in extents.items() if key.sequence == sequence)
        for sequence in range(2)
    }
    for key, extent in extents.items():
        if key.sequence == 1:
            assert extent.offset_bytes >= ends[0]
        if key.sequence == 2:
            assert extent == extents[key._replace(sequence=0)]


def use_order(program):
    """Spelling of the blocks of two stages, of layers 3 to 5 and of layer 6, in order of use."""
    stages = {0: layout(2), 1: layout(2, layers=range(6, 7))}
    shards = {2: layout(2, layers=range(7, 9))}
    keys = order_of_use(map(parse_action, program.split()), stages, shards=shards)
    return " ".join(f"{'kv' * k.is_kv}{k.sequence}.{k.subsequence}.{k.layer}" for k in keys)


def test_backward_uses_the_blocks_of_its_layers_from_the_last_to_the_first():
    assert use_order("0F0.0 0D2H0.0 0H2D0.0 1B0.0 0B0.0") == "0.0.6 0.0.5 0.0.4 0.0.3"
    assert use_order("2B0.0") == "", "another rank's"
    assert (
        use_order("0H2D_KV0.0 2F0.0[1/2] 2B0.0[1/2] 1B0.0")
        == "0.0.8 kv0.0.3 0.0.7 kv0.0.4 kv0.0.5 0.0.6"
    )


def test_k_and_v_return_one_between_two_layers_and_the_rest_after_the_backward():
    assert use_order("0H2D_KV0.0 0B1.0 0B0.0") == (
        "1.0.5 kv0.0.3 1.0.4 kv0.0.4 1.0.3 kv0.0.5 0.0.5 0.0.4 0.0.3"
    )
    assert use_order("0H2D_KV0.1 1B0.1 0B0.1") == (
        "0.1.6 kv0.1.3 kv0.1.4 kv0.1.5 0.1.5 0.1.4 0.1.3"
    )


def test_k_and_v_return_before_the_backward_that_reads_them():
    assert use_order("0H2D_KV0.0 0B0.0") == "kv0.0.3 kv0.0.4 kv0.0.5 0.0.5 0.0.4 0.0.3"


def test_layers_of_two_types_have_blocks_of_their_own_and_keep_the_choice_of_experts():
    """Layers 0 and 1 are dense; of layers that share an input, one without keeps its choice."""
    experts = {"count": 4, "per_token": 3, "mlp_size": 48, "dense_layers": 2}
    model = ModelConfig(**{**PRESETS["tiny-test"], "num_layers": 4, "experts": experts})
    blocks = BlockLayout(model, layers=range(4), element_bytes=4, input_every=2)
    placement = SubsequencePlacement((24, 24, 24), (40, 40, 40), (0, 0, 0))
    stage = ActivationLayout(blocks, {(0, 0): (placement,)})
    for layer in range(4):
        offloaded, retained = stage.tensor_rows((0, 0), layer)
        assert ("x_in" in offloaded) == (layer % 2 == 0)
        assert retained.get("chosen") == (64 if layer >= 2 else None)
        assert "chosen" not in offloaded
    without, with_more = (
        stage.extents()[ActivationKey(0, 0, layer)].size_bytes for layer in (1, 3)
    )
    more_bytes = 2 * (3 * 48 - model.mlp_size) * 40 * 4
    assert 0 <= with_more - without - more_bytes < BLOCK_ALIGNMENT_BYTES
    held = 24 * saved_bytes_per_token("retain", model, layers=range(4), element_bytes=4)
    held += 2 * (64 - 24) * 6 - 2 * 24 * model.hidden_size * 4
    assert stage.retained_bytes((0, 0)) == held
