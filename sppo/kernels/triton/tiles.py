"""Tile sizes of the attention kernels, by head size, element size and compute capability."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries and keys of one tile of a kernel, and the warps and stages to compile it with."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Tiles of the three attention kernels."""

    forward: Tiles
    query_gradient: Tiles
    key_gradient: Tiles


_TILES = {
    (64, 2): AttentionTiles(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 128, 8, 2)),
    (128, 2): AttentionTiles(Tiles(128, 32, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
    (256, 2): AttentionTiles(Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 1), Tiles(32, 32, 8, 2)),
    (64, 4): AttentionTiles(Tiles(64, 16, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
    (128, 4): AttentionTiles(Tiles(32, 16, 8, 2), Tiles(16, 32, 8, 2), Tiles(32, 32, 8, 2)),
    (64, 8): AttentionTiles(Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
}
"""Tiles by (head size, bytes of an element). Kernels fit the shared memory of every device from
compute capability 8.0 on, 99 KiB at least; cases not listed use the smallest tiles."""
_WARPGROUP_TILES = {
    (128, 2): AttentionTiles(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 4, 2)),
}
"""Tiles for devices on which four warps multiply together, with operands in shared memory. Two
such groups would both compute all scores of 64 keys."""
_WARPGROUP_MAJORS = (9, 10, 11)
_FINE = AttentionTiles(Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1))
_LEAST_HEAD = 64


def attention_tiles(head_size: int, element_bytes: int, compute_major: int) -> AttentionTiles:
    """Return the tiles of the three attention kernels.

    The tiles were chosen by the registers, spills and shared memory of compilations for compute
    capabilities 8.0, 9.0 and 10.0 (docs/results/compiled_kernels.json), not by timings on a GPU.

    Args:
        head_size: Elements of a head, rounded up to a power of two.
        element_bytes: Bytes of an element of queries, keys and values.
        compute_major: Major number of the device's compute capability.
    """
    case = (max(head_size, _LEAST_HEAD), element_bytes)
    if compute_major in _WARPGROUP_MAJORS and case in _WARPGROUP_TILES:
        return _WARPGROUP_TILES[case]
    return _TILES.get(case, _FINE)
