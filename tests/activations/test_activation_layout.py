"""Positions of the blocks of offloaded activations in the tier."""

from __future__ import annotations

from itertools import pairwise

from sppo.activations.activation_layout import (
    BLOCK_ALIGNMENT_BYTES,
    ActivationKey,
    ActivationLayout,
    BlockLayout,
)
from sppo.activations.placement import SubsequencePlacement
from sppo.activations.tensor_classes import tensor_bytes_per_token
from sppo.config.model import ModelConfig
from sppo.config.presets import PRESETS

LAYERS = range(3, 6)
ROWS = ((0, 0, 0), (64, 40, 0), (10, 64, 64))
"""Offloaded of each subsequence of 64 tokens: nothing, a part, more."""


def layout(sequences):
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
    row_bytes = tensor_bytes_per_token(model, element_bytes=4)
    return ActivationLayout(BlockLayout(row_bytes, layers=LAYERS), shards)


def test_blocks_of_a_sequence_lie_one_behind_the_other():
    found = layout(1).offload_schedule([(0, 2), (0, 1), (0, 0)], sequences_in_flight=1)
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
    order = [(sequence, index) for sequence in range(3) for index in (2, 1, 0)]
    extents = layout(3).offload_schedule(order, sequences_in_flight=2).extents
    ends = {
        sequence: max(sum(extent) for key, extent in extents.items() if key.sequence == sequence)
        for sequence in range(2)
    }
    for key, extent in extents.items():
        if key.sequence == 1:
            assert extent.offset_bytes >= ends[0]
        if key.sequence == 2:
            assert extent == extents[key._replace(sequence=0)]
