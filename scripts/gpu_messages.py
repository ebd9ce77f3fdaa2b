"""Measure what communicators take on two GPUs: memory, and compute beside an open receive.

For each number of thread blocks (CTAs) that NCCL may use: device memory of a communicator after its
first message, as a plan counts it in ``communicators_bytes``, and the time of matrix products on a
rank that has posted a receive whose message is not sent before the products are done. Run by
``scripts/gpu_check.sh`` where there are two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from sppo.output_file import write_text

_processes: Any = torch.multiprocessing  # parts of it have no types

CTAS = (4, 8, 32)
RANKS, ELEMENTS, ROUNDS = 2, 32 << 20, 5
TIMEOUT = timedelta(seconds=60)


def device_of(rank: int, *, rehearse: bool) -> torch.device:
    """Return the device of a rank: its GPU, or the CPU to try this script itself."""
    return torch.device("cpu") if rehearse else torch.device("cuda", rank)


def used_bytes(device: torch.device) -> int:
    """Return the used memory of a GPU, by all allocators; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def new_group(device: torch.device, ctas: int | None) -> Any:
    """Return a communicator of both ranks with at most `ctas` thread blocks; None for no limit."""
    if device.type == "cpu":
        return dist.new_group(backend="gloo", timeout=TIMEOUT)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = TIMEOUT
    if ctas is not None:
        options.config.max_ctas = ctas
    return dist.new_group(backend="nccl", timeout=TIMEOUT, pg_options=options, device_id=device)


def products_s(x: torch.Tensor, *, count: int) -> float:
    """Return the seconds of `count` products of a matrix with itself."""
    start = time.perf_counter()
    for _ in range(count):
        x @ x
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()
    return time.perf_counter() - start


def measure(rank: int, port: int, out: Path, rehearse: bool) -> None:
    """Measure as one of two ranks; rank 1 computes, receives and writes the figures."""
    device = device_of(rank, rehearse=rehearse)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    size, count = (64, 2) if rehearse else (8192, 20)
    x = torch.randn(size, size, device=device, dtype=torch.float32 if rehearse else torch.bfloat16)
    message = torch.ones(1024 if rehearse else ELEMENTS, device=device)
    products_s(x, count=count)
    found: dict[str, Any] = {"alone_s": [], "communicators": []}
    for ctas in (None, *CTAS):
        before = used_bytes(device)
        group = new_group(device, ctas)
        dist.all_reduce(torch.ones(1, device=device), group=group)
        row: dict[str, Any] = {"max_ctas": ctas}
        row["all_reduce_bytes"] = used_bytes(device) - before
        exchange(rank, message, group)
        row["send_bytes"] = used_bytes(device) - before
        seconds = [beside(rank, x, message, group, count) for _ in range(ROUNDS)]
        row["beside_open_receive_s"] = seconds
        found["alone_s"].append(products_s(x, count=count))
        found["communicators"].append(row)
        if rank == 1:
            write_text(out, json.dumps(found, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def exchange(rank: int, message: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send a message from rank 0 to rank 1."""
    if rank == 0:
        dist.send(message, 1, group=group)
    else:
        dist.recv(message, 0, group=group)


def beside(
    rank: int, x: torch.Tensor, message: torch.Tensor, group: dist.ProcessGroup, count: int
) -> float:
    """Return rank 1's seconds of `count` products while its receive waits; rank 0 sends later."""
    if rank == 0:
        dist.barrier()  # over gloo: rank 1 is done
        dist.send(message, 1, group=group)
        return 0.0
    work = dist.irecv(message, 0, group=group)
    seconds = products_s(x, count=count)
    dist.barrier()
    assert work is not None
    work.wait()
    return seconds


def main() -> int:
    """Measure; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU, to try this script itself"
    )
    options = parser.parse_args()
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = (port, options.out.resolve(), options.rehearse)
    _processes.spawn(measure, args=words, nprocs=RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
