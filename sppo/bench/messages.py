"""Messages between two ranks on the CPU: their rate, and the compute that they take from the ranks.

A CPU carries its own messages: while a core copies into or out of a socket it multiplies nothing.
So a message costs both of its ranks compute, which no schedule hides.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sppo.bench.timing import Watcher
from sppo.parallel.job.end_with_parent import end_with_parent
from sppo.parallel.job.launch import held_back
from sppo.parallel.job.signals import STOP_SIGNALS
from sppo.parallel.job.worker_process import without_script
from sppo.units import MIB

_RANKS = 2
_SMALL_BYTES, _LARGE_BYTES = 4096, 8 * MIB
_BESIDE_BYTES = MIB // 2
"""Size of a message beside compute: that of a subsequence of a narrow model."""
_WIDTH = 512
"""Width of the square matrices that are multiplied meanwhile."""
_PRODUCTS, _QUICK_PRODUCTS = 100, 10
_ROUNDS, _QUICK_ROUNDS = 5, 2
_TIMEOUT = timedelta(minutes=2)
_END_S = 10.0
"""Seconds that a process which has measured may take to end."""


@dataclass(frozen=True, slots=True)
class MessageMeasurements:
    """Costs of messages between two processes of this machine.

    Attributes:
        bytes_per_s: Of one large message.
        latency_s: Until a small one is there.
        compute_s_per_byte: Compute that a byte takes on each end.
        spread: Of rounds of the last, between fastest and slowest, relative to the median time.
    """

    bytes_per_s: float
    latency_s: float
    compute_s_per_byte: float
    spread: float


def measure_messages(*, quick: bool, watcher: Watcher) -> MessageMeasurements:
    """Measure messages over gloo between two processes of one thread each.

    Args:
        quick: fewer rounds: to see that it works.
        watcher: is told of every round.

    Raises:
        RuntimeError: a process failed; its error is on stderr.
    """
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    products = _QUICK_PRODUCTS if quick else _PRODUCTS
    watcher.begin("messages", total=rounds)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="sppo-") as directory:
        answers, answer = context.Pipe(duplex=False)
        store = Path(directory) / "store"
        processes = [
            context.Process(
                target=_serve, args=(rank, store, rounds, products, answer, os.getpid())
            )
            for rank in range(_RANKS)
        ]
        try:
            # A terminal sends Ctrl-C to them, too: this process alone ends them.
            with held_back(STOP_SIGNALS), without_script():
                for process in processes:
                    process.start()
            answer.close()
            found = MessageMeasurements(**_report(answers, processes, watcher))
            for process in processes:  # one that ends first would be an error of the other
                process.join(_END_S)
            return found
        finally:
            started = [process for process in processes if process.pid is not None]
            for process in started:
                process.kill()
            for process in started:
                process.join()


def _report(
    answers: Connection, processes: Sequence[BaseProcess], watcher: Watcher
) -> dict[str, float]:
    """Return what rank 0 reports at its end; rounds are told as they come."""
    failed = RuntimeError("measuring messages: a process failed; its error stands above")
    while True:
        ready = wait([answers, *(process.sentinel for process in processes)])
        if answers in ready:
            try:
                told = answers.recv()
            except EOFError:  # both have ended
                raise failed from None
            if isinstance(told, dict):
                return told
            watcher.advance()
        elif any(process.exitcode for process in processes):
            raise failed


def _serve(
    rank: int, store: Path, rounds: int, products: int, answer: Connection, parent: int
) -> None:
    """One of both processes; ends with its parent."""
    end_with_parent(parent)
    import torch
    import torch.distributed as dist

    from sppo.parallel.job.rendezvous import use_loopback

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
        if rank == 0:
            answer.send("a round is done")
    if rank == 0:
        carried = 2 * products * _BESIDE_BYTES  # sent and received
        answer.send(
            {
                "bytes_per_s": _LARGE_BYTES / max(1e-9, large_s - latency_s),
                "latency_s": latency_s,
                "compute_s_per_byte": max(0.0, statistics.median(added)) / carried,
                "spread": (max(beside) - min(beside)) / statistics.median(beside),
            }
        )
    dist.barrier()
    dist.destroy_process_group()


def _timed(work: Callable[[], None]) -> float:
    """Return the seconds from when both are ready until both are done."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


class _Pair:
    """This process and the other one, with a group for each direction as pipelines have them."""

    def __init__(self, rank: int) -> None:
        import torch
        import torch.distributed as dist

        self._rank, self._other = rank, 1 - rank
        self._groups = [dist.new_group([0, 1]) for _ in range(_RANKS)]  # by sender
        self._a, self._b = (torch.rand(_WIDTH, _WIDTH) for _ in range(2))
        self._c = torch.empty(_WIDTH, _WIDTH)

    def one_way_s(self, size_bytes: int, *, turns: int) -> float:
        """Median of half the time to there and back."""
        import torch
        import torch.distributed as dist

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
        """Multiply matrices; with messages, send one and receive one beside each product."""
        import torch
        import torch.distributed as dist

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
