"""Messages between two ranks on the CPU: rate, latency, and the compute time that they cost.

A CPU carries its own messages: a core that copies to or from a socket does not compute. So a
message costs compute time on both of its ranks, which no schedule hides.
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
"""Size of a message during compute: that of a subsequence of a narrow model."""
_WIDTH = 512
"""Width of the square matrices that are multiplied while messages are sent."""
_PRODUCTS, _QUICK_PRODUCTS = 100, 10
_ROUNDS, _QUICK_ROUNDS = 5, 2
_TIMEOUT = timedelta(minutes=2)
_END_S = 10.0
"""Seconds that a process may take to end after its last measurement."""


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
        watcher: Receiver of the progress, notified of every round.

    Raises:
        RuntimeError: A process that failed; its error is on stderr.
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
            # A terminal also sends Ctrl-C to the children, which only this process may end.
            with held_back(STOP_SIGNALS), without_script():
                for process in processes:
                    process.start()
            answer.close()
            found = MessageMeasurements(**_report(answers, processes, watcher))
            for process in processes:  # killing one early would be an error in the other
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
    """Return the figures that rank 0 reports at its end; advance ``watcher`` after each round."""
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
    """Run one of the two measuring processes, which ends with its parent."""
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
    """Return the seconds of ``work``, from both ranks being ready until both have finished."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


class _Pair:
    """Pair of this rank and the other one, with one group per direction as in pipelines."""

    def __init__(self, rank: int) -> None:
        import torch
        import torch.distributed as dist

        self._rank, self._other = rank, 1 - rank
        self._groups = [dist.new_group([0, 1]) for _ in range(_RANKS)]  # by sender
        self._a, self._b = (torch.rand(_WIDTH, _WIDTH) for _ in range(2))
        self._c = torch.empty(_WIDTH, _WIDTH)

    def one_way_s(self, size_bytes: int, *, turns: int) -> float:
        """Return the median of half the round-trip time of a message."""
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
        """Multiply matrices; with ``messages``, send and receive one during each product."""
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
