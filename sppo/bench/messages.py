"""Messages between two ranks on the CPU: rate, latency, and the compute time that they cost.

A CPU carries its own messages: a core that copies to or from a socket does not compute. So a
message costs compute time on both of its ranks, which no schedule hides.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sppo.bench.processes import at_once
from sppo.bench.timing import Watcher
from sppo.parallel.job.rendezvous import use_loopback
from sppo.units import MIB

_RANKS = 2
_SMALL_BYTES, _LARGE_BYTES = 4096, 8 * MIB
_BESIDE_BYTES = MIB // 2
"""Size of a message during compute: that of a subsequence of a narrow model."""
_WIDTH = 512
"""Width of the square matrices that are multiplied while messages are sent."""
_PRODUCTS, _QUICK_PRODUCTS = 100, 10
_ROUNDS, _QUICK_ROUNDS = 5, 2
_TIMEOUT = timedelta(minutes=2)


@dataclass(frozen=True, slots=True)
class MessageMeasurements:
    """Costs of messages between two processes of this machine.

    Attributes:
        bytes_per_s: Rate of one large message.
        latency_s: Seconds until a small message has arrived.
        compute_s_per_byte: Compute time that a byte costs on each end.
        spread: Difference between the fastest and slowest round of compute with messages, relative
            to the median.
    """

    bytes_per_s: float
    latency_s: float
    compute_s_per_byte: float
    spread: float


def measure_messages(*, quick: bool, watcher: Watcher) -> MessageMeasurements:
    """Measure messages over gloo between two processes of one thread each.

    Args:
        quick: Run fewer rounds, to test the benchmark.
        watcher: Receiver of the progress, notified of the end of each process.

    Raises:
        RuntimeError: A process that failed.
    """
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    products = _QUICK_PRODUCTS if quick else _PRODUCTS
    watcher.begin("messages", total=_RANKS)
    with tempfile.TemporaryDirectory(prefix="sppo-") as directory:
        found = at_once(
            _measure,
            [(rank, Path(directory) / "store", rounds, products) for rank in range(_RANKS)],
            timeout_s=_TIMEOUT.total_seconds(),
            advance=watcher.advance,
        )
    return found[0]


def _measure(rank: int, store: Path, rounds: int, products: int) -> MessageMeasurements:
    """Measure as one of the two processes."""
    torch.set_num_threads(1)
    use_loopback()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=_RANKS, timeout=_TIMEOUT
    )
    pair = _Pair(rank)
    latency_s = pair.one_way_s(_SMALL_BYTES, turns=20 * rounds)
    large_s = pair.one_way_s(_LARGE_BYTES, turns=rounds)
    added, beside = [], []
    for _ in range(rounds):
        alone_s = _timed(lambda: pair.compute(products))
        with_s = _timed(lambda: pair.compute(products, messages=True))
        added.append(with_s - alone_s)
        beside.append(with_s)
    dist.destroy_process_group()
    carried = 2 * products * _BESIDE_BYTES  # sent and received
    return MessageMeasurements(
        bytes_per_s=_LARGE_BYTES / max(1e-9, large_s - latency_s),
        latency_s=latency_s,
        compute_s_per_byte=max(0.0, statistics.median(added)) / carried,
        spread=(max(beside) - min(beside)) / statistics.median(beside),
    )


def _timed(work: Callable[[], None]) -> float:
    """Return the seconds of ``work``, from both ranks being ready until both have finished."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


class _Pair:
    """Pair of this rank and the other one, with one group per direction as in pipelines."""

    def __init__(self, rank: int) -> None:
        self._rank, self._other = rank, 1 - rank
        self._groups = [dist.new_group([0, 1]) for _ in range(_RANKS)]  # by sender
        self._a, self._b = (torch.rand(_WIDTH, _WIDTH) for _ in range(2))
        self._c = torch.empty(_WIDTH, _WIDTH)

    def one_way_s(self, size_bytes: int, *, turns: int) -> float:
        """Return the median of half the round-trip time of a message."""
        buffer = torch.zeros(size_bytes, dtype=torch.uint8)
        seconds = []
        for _ in range(turns + 1):
            start = time.perf_counter()
            for sender in range(_RANKS):
                move = dist.send if sender == self._rank else dist.recv
                move(buffer, self._other, group=self._groups[sender])
            seconds.append((time.perf_counter() - start) / 2)
        return statistics.median(seconds[1:])

    def compute(self, products: int, *, messages: bool = False) -> None:
        """Multiply matrices; with ``messages``, send and receive one during each product."""
        out = torch.zeros(_BESIDE_BYTES, dtype=torch.uint8)
        places = [torch.zeros(_BESIDE_BYTES, dtype=torch.uint8) for _ in range(2)]
        under_way: list[Any] = []
        for number in range(products):
            if messages:
                for work in under_way:
                    work.wait()
                receive, send = self._groups[self._other], self._groups[self._rank]
                under_way = [
                    dist.irecv(places[number % 2], self._other, group=receive),
                    dist.isend(out, self._other, group=send),
                ]
            torch.mm(self._a, self._b, out=self._c)
        for work in under_way:
            work.wait()
