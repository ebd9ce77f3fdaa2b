"""Sizes of the tiles that one program of an attention kernel works on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel is cut, and how it is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Of the three attention kernels."""

    forward: Tiles
    query_gradient: Tiles
    key_gradient: Tiles


_TILES = {
    128: AttentionTiles(Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 2), Tiles(64, 128, 8, 2)),
    256: AttentionTiles(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
    512: AttentionTiles(Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 2)),
}
"""By bytes of a row of the head; every kernel fits 99 KiB of shared memory (see the tests)."""
_LARGE = AttentionTiles(Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1))


def attention_tiles(head_size: int, element_bytes: int) -> AttentionTiles:
    """For heads of ``head_size`` (a power of two) elements.

    Picked by the shared memory they take, and not yet by speed on any GPU.
    """
    row_bytes = max(head_size * element_bytes, min(_TILES))
    return _TILES.get(row_bytes, _LARGE)
