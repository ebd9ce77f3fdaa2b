"""Engines that offload saved tensors: placements for any partition, and every tier."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from sppo.activations.block_layout import BlockLayout
from sppo.activations.subsequence_placement import SubsequencePlacement
from sppo.activations.tensor_classes import (
    ATTENTION,
    class_bytes_per_token,
)
from sppo.engine.pipeline import ALONE
from sppo.offload.block_store import BlockStore
from sppo.offload.lane import Lane
from tests.engine.models import Trained
from tests.offload.emulated_lane import SCHEDULERS, EmulatedLane


def with_offsets(model, rows, *, element_bytes, input_every=1):
    """Plans of subsequences by their (retained, offloaded, recomputed), blocks in a row."""
    shape = BlockLayout(
        model,
        layers=range(model.num_layers),
        element_bytes=element_bytes,
        input_every=input_every,
    )
    _, offloaded, recomputed = np.array(rows).swapaxes(0, 1)
    blocks = shape.blocks(offloaded, attention_saved=recomputed[:, ATTENTION] == 0)
    offsets = accumulate(blocks.sum(axis=1).tolist(), initial=0)
    return tuple(
        SubsequencePlacement(*own, offset) for own, offset in zip(rows, offsets, strict=False)
    )


@dataclass(frozen=True)
class RatioRows:
    """The first ``ratio`` of what each subsequence but the last saves moves, most valuable first.

    Classes are cut at any row, and not at each 128th as in real plans.
    """

    model: object
    element_bytes: int
    ratio: float
    rest: str = "kept"
    last_too: bool = False
    input_every: int = 1

    def __call__(self, lengths):
        model = self.model
        (layer_type, *_) = (
            t for t in map(model.layer_type, range(model.num_layers)) if not t.linear
        )
        sizes = class_bytes_per_token(model, layer_type, element_bytes=self.element_bytes)
        rows = []
        for index, tokens in enumerate(lengths):
            stays = index == len(lengths) - 1 and not self.last_too
            offloaded = self._offloaded(tokens, sizes) if not stays else (0, 0, 0)
            left = tuple(tokens - m for m in offloaded)
            nothing = (0, 0, 0)
            if self.rest == "kept" or stays:
                rows.append((left, offloaded, nothing))
            else:  # the input can not be recomputed
                rows.append(((left[0], 0, 0), offloaded, (0, *left[1:])))
        return with_offsets(
            self.model, rows, element_bytes=self.element_bytes, input_every=self.input_every
        )

    def _offloaded(self, tokens, sizes):
        left, offloaded = float(self.ratio * tokens * sizes.sum()), []
        for size in sizes:
            rows = min(tokens, int(left / size + 1e-9))
            offloaded.append(rows)
            left = left - rows * size if rows == tokens else 0.0
        return tuple(offloaded)


@dataclass(frozen=True)
class FixedRows:
    """The same (retained, offloaded, recomputed) for every sequence of these cuts."""

    model: object
    element_bytes: int
    rows: tuple

    def __call__(self, lengths):
        return with_offsets(self.model, self.rows, element_bytes=self.element_bytes)


def lane_of(name):
    return Lane() if name == "threads" else EmulatedLane(SCHEDULERS[name]())


def offloading_trained(
    model, weights, rows, *, pipeline=ALONE, directory=None, lane="threads", lag=1, **options
):
    """An engine whose stages all move what ``rows`` says, to a disk if there is a directory."""
    store = BlockStore(lane_of(lane), disk=directory, source_lag=lag, debug=True)
    placements = dict.fromkeys(range(pipeline.placement.num_stages), rows)
    pipeline = replace(pipeline, placements=placements)
    return Trained(model, weights, offloaded=store, pipeline=pipeline, **options)
