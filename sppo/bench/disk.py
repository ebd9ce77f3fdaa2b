"""Rates of the disk tier as in training: writes, reads, and both at once through a file tier.

The first write to allocated space is slow, so all of the file is written once before the rates are
measured. The data are random because some disks compress.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from sppo.bench.copies import CopyMeasurements, Times, each_way, measure_point
from sppo.bench.timing import Watcher
from sppo.offload.arena import HostArena
from sppo.offload.disk.disk_room import disk_room, is_memory
from sppo.offload.disk.file_tier import FileTier
from sppo.offload.worker_pool import THREADS, wait_for
from sppo.units import MIB, format_bytes

_FILE_BYTES, _QUICK_FILE_BYTES = 1024 * MIB, 128 * MIB
_REQUESTS = (MIB, 16 * MIB, 64 * MIB)
_QUICK_REQUESTS = (MIB, 16 * MIB)
_WINDOW_S, _QUICK_WINDOW_S = 0.25, 0.05
_ROUNDS, _QUICK_ROUNDS = 3, 1
_PLANNED_BYTES = 16 * MIB
"""Request size of a training run: a layer of a subsequence has tens of MiB."""


def measure_disk(directory: Path, *, quick: bool, watcher: Watcher) -> CopyMeasurements:
    """Measure the disk of ``directory``; no file remains.

    Args:
        directory: Existing directory that can be written to.
        quick: Use less space, shorter windows and fewer sizes.
        watcher: Receiver of the progress, notified of every round.

    Raises:
        ValueError: A directory that does not exist or cannot be written to.
        OSError: A disk that lacks the space, or failed.
    """
    check_disk(directory, quick=quick)
    requests = _QUICK_REQUESTS if quick else _REQUESTS
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    window_s = _QUICK_WINDOW_S if quick else _WINDOW_S
    watcher.begin("disk", total=1 + len(requests) * rounds)
    memory_bytes = 2 * max(requests)
    memory = HostArena(memory_bytes).tensor(0, (memory_bytes,), torch.uint8).numpy()
    size_bytes = _QUICK_FILE_BYTES if quick else _FILE_BYTES
    with ExitStack() as stack:
        tier = stack.enter_context(closing(FileTier()))
        tier.open(directory, size_bytes)
        _fill_with_noise(memory)
        halves = np.split(memory, 2)
        _write_all(tier, halves[0])
        watcher.advance()
        points = [
            measure_point(
                _Windows(tier, halves, size, window_s).run,
                request_bytes=size,
                rounds=rounds,
                advance=watcher.advance,
            )
            for size in requests
        ]
        where = _where(tier)
    return CopyMeasurements(
        "disk",
        where,
        tuple(points),
        planned=next(point for point in points if point.request_bytes == _PLANNED_BYTES),
        room_bytes=disk_room(directory).usable_bytes,
    )


def check_disk(directory: Path, *, quick: bool) -> None:
    """Check before measuring that ``directory`` can be used.

    Raises:
        ValueError: A directory that does not exist or cannot be written to.
        OSError: A disk that lacks the space.
    """
    if not directory.is_dir():
        raise ValueError(
            f"--disk {directory}: there is no such directory; name one on the disk to measure"
        )
    if not os.access(directory, os.W_OK):
        raise ValueError(f"--disk {directory}: cannot be written to; name a directory that can")
    room, needed = disk_room(directory), _QUICK_FILE_BYTES if quick else _FILE_BYTES
    if needed > room.usable_bytes:
        raise OSError(
            errno.ENOSPC,
            f"measuring the disk takes {format_bytes(needed)} in {directory}: {room}; free space, "
            "or name a directory on another disk with --disk",
        )


def _write_all(tier: FileTier, memory: NDArray[np.uint8]) -> None:
    """Write all of ``tier`` once."""
    size = min(_PLANNED_BYTES, len(memory))
    for offset in range(0, tier.size_bytes, size):
        wait_for(tier.write(offset, memory[: min(size, tier.size_bytes - offset)]))


class _Windows:
    """Requests of one size during a window of time: writes to one half of a file, reads of another.

    With two halves no request waits for another one of the same bytes, as in a training run.
    """

    def __init__(
        self,
        tier: FileTier,
        memory: list[NDArray[np.uint8]],
        request_bytes: int,
        window_s: float,
    ) -> None:
        self._tier, self._memory = tier, memory
        self._request_bytes, self._window_s = request_bytes, window_s

    def run(self, out: bool, back: bool) -> tuple[Times, Times]:
        """Return the completion times of (writes, reads) in one window."""
        times: tuple[list[float], list[float]] = ([], [])
        start_s = time.perf_counter()
        each_way(
            lambda index: self._move(index, start_s=start_s, times=times[index]),
            [index for index, asked in enumerate((out, back)) if asked],
        )
        return times

    def _move(self, index: int, *, start_s: float, times: list[float]) -> None:
        """Run requests of direction ``index`` until the window ends, at least one request."""
        size, half = self._request_bytes, self._tier.size_bytes // 2
        start = (self._tier.write, self._tier.read)[index]
        turn = 0
        while turn == 0 or time.perf_counter() - start_s < self._window_s:
            place = index * half + turn % (half // size) * size
            wait_for(start(place, self._memory[index][:size]))
            times.append(time.perf_counter() - start_s)
            turn += 1


def _fill_with_noise(memory: NDArray[np.uint8]) -> None:
    """Fill ``memory`` with random bytes: each MiB is the same noise from another offset."""
    noise = np.frombuffer(os.urandom(MIB + 4099), dtype=np.uint8)
    for number, offset in enumerate(range(0, len(memory), MIB)):
        part = memory[offset : offset + MIB]
        begin = number % 4099
        part[:] = noise[begin : begin + len(part)]


def _where(tier: FileTier) -> str:
    how = (
        "past the page cache (O_DIRECT)"
        if tier.direct
        else "through the page cache, which cannot be passed by here: rates are memory's, too"
    )
    memory = "; this directory is memory, not a disk" if is_memory(tier.directory) else ""
    return f"disk tier in {tier.directory}, {how}, {THREADS} threads{memory}"
