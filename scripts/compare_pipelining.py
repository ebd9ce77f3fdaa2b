"""Compare SPPO with torch.distributed.pipelining on two pipeline ranks on the CPU.

Both sides run forward and backward of a step of the same Llama-shaped model in bf16, with the same
weights, tokens and tiled loss, and recompute nothing. A rank is a process with one thread; ranks
communicate over gloo. SPPO runs each sequence in N subsequences; torch runs whole sequences as
micro-batches, with GPipe for one sequence and 1F1B for more. The sides alternate step by step, so
that noise of the machine affects both; the waiting side sleeps. Run by
``scripts/compare_pipelining.sh``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Protocol, cast

from option_types import output_file
from turns import take_turns  # beside this file

from sppo.output_file import write_text

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 2,
    "mlp_size": 1792,
}
SIDES = ("sppo", "torch")
RANKS = 2
TIMEOUT = timedelta(hours=2)
LARGEST_DIFFERENCE = 0.02
"""Largest relative difference of losses and gradient norms: both sides round to bf16, in different
places."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of one side with one number of sequences; lists have an entry per rank."""

    side: str
    schedule: str
    step_s: float
    """Median over the steps, from barrier to barrier."""
    tokens_per_s: float
    peak_bytes: list[int]
    """Largest resident memory above the idle process, which holds weights and no gradients."""
    cpu_share: list[float]
    """Processor time over step time; the remainder to 1 was spent waiting."""
    loss: float
    gradient_norm: list[float]
    bubble_fraction: float | None
    """Measured idle share of all ranks in the executed trace; None without a trace."""
    planned_bubble_fraction: float | None
    """Simulated idle share, with analytic rates."""


@dataclass(frozen=True, slots=True)
class Case:
    """Comparison of both sides with one number of sequences."""

    length_tokens: int
    sequences: int
    boundaries: list[int]
    sides: list[Measurement]
    speedup: float
    """Tokens per second of SPPO over those of torch."""
    peak_ratio: list[float]
    """Peak memory of SPPO over that of torch, for each rank."""
    largest_difference: float
    """Largest relative difference of loss and gradient norms."""


class Side(Protocol):
    """Interface of one rank of one side."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that exist between steps; they count as memory of the step."""
        ...

    def warm_up(self) -> None:
        """Load and compile everything that the first step would."""
        ...

    def trim(self) -> None:
        """Return unused memory of the allocator to the system."""
        ...

    def step(self) -> None:
        """Run forward and backward of all sequences."""
        ...

    def findings(self) -> dict[str, Any]:
        """Return figures of the last step; not part of the timed step."""
        ...


def main() -> None:
    """Parse arguments, compare, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=32768, help="tokens of a sequence")
    parser.add_argument("--subsequences", "--pieces", type=int, default=8, help="of a sequence (N)")
    parser.add_argument("--sequences", default="1,2,4", help="per step, comma-separated")
    parser.add_argument("--steps", type=int, default=1, help="measured steps of each side")
    parser.add_argument("--partition", default="flops", help="sequence.partition of SPPO's side")
    parser.add_argument("--schedule", default="auto", help="parallel.schedule of SPPO's side")
    parser.add_argument(
        "--pool-for-torch", action="store_true", help="SPPO's memory pool for torch's side too"
    )
    parser.add_argument("--output", type=output_file, help="write the measurements here as JSON")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _serve(arguments)
        return
    cases: list[Case] = []
    for sequences in (int(text) for text in arguments.sequences.split(",")):
        case = compare(arguments, sequences)
        cases.append(case)
        _print(case)
        if arguments.output is not None:
            _write_report(arguments.output, cases)
    if any(case.largest_difference > LARGEST_DIFFERENCE for case in cases):
        raise SystemExit("the two sides do not compute the same")


def compare(arguments: argparse.Namespace, sequences: int) -> Case:
    """Start both sides, and run their steps in turns."""
    words = [*sys.argv[1:], "--sequences", str(sequences)]
    commands = {side: [__file__, *words, "--worker", side] for side in SIDES}
    label = f"{sequences} x {arguments.length} "
    found = take_turns(commands, turns=arguments.steps, threads=1, label=label)
    tokens = sequences * arguments.length
    ours, theirs = (_measurement(side, found[side], tokens=tokens) for side in SIDES)
    peaks = zip(ours.peak_bytes, theirs.peak_bytes, strict=True)
    return Case(
        length_tokens=arguments.length,
        sequences=sequences,
        boundaries=found["sppo"][-1]["boundaries"],
        sides=[ours, theirs],
        speedup=ours.tokens_per_s / theirs.tokens_per_s,
        peak_ratio=[a / b for a, b in peaks],
        largest_difference=max(
            abs(a / b - 1)
            for a, b in zip(
                [ours.loss, *ours.gradient_norm], [theirs.loss, *theirs.gradient_norm], strict=True
            )
        ),
    )


def _measurement(side: str, answers: Sequence[dict[str, Any]], *, tokens: int) -> Measurement:
    """Return the measurement of one side; each answer has the figures of all ranks in one step."""
    steps = [answer["step_s"] for answer in answers]
    step_s = statistics.median(steps)
    ranks = [[answer["ranks"][rank] for answer in answers] for rank in range(RANKS)]
    last = answers[-1]["ranks"]
    bubbles = []
    for answer in answers if "busy_s" in last[0] else []:
        busy_s = sum(rank["busy_s"] for rank in answer["ranks"])
        bubbles.append(1 - busy_s / (RANKS * answer["step_s"]))
    return Measurement(
        side=side,
        schedule=last[0]["schedule"],
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        peak_bytes=[max(found["peak_bytes"] for found in of_rank) for of_rank in ranks],
        cpu_share=[sum(found["cpu_s"] for found in of_rank) / sum(steps) for of_rank in ranks],
        loss=sum(rank["loss"] for rank in last),  # 0 before the last stage
        gradient_norm=[rank["gradient_norm"] for rank in last],
        bubble_fraction=statistics.median(bubbles) if bubbles else None,
        planned_bubble_fraction=last[0].get("planned_bubble_fraction"),
    )


def _serve(arguments: argparse.Namespace) -> None:
    """Run one rank of one side, which answers each line on stdin with one measured step.

    Rank 0 starts the other rank, forwards the lines and adds the other rank's answers to its own.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    first = arguments.rank == 0
    store = TCPStore("127.0.0.1", arguments.port, is_master=first, timeout=TIMEOUT)
    peer = _start_peer(store.port) if first else None
    dist.init_process_group(
        "gloo", store=store, rank=arguments.rank, world_size=RANKS, timeout=TIMEOUT
    )
    side = _build(arguments)
    side.warm_up()
    idle = _idle_bytes(side)
    dist.barrier()
    print("ready", flush=True)
    if peer is not None:
        assert _line_of(peer).strip() == "ready", "the other rank answers in the same words"
    for line in sys.stdin:
        if peer is not None:
            _tell(peer, line)
        answer = _measured_step(side, idle=idle)
        if peer is not None:
            ranks = [answer, json.loads(_line_of(peer))]
            seconds = max(rank["step_s"] for rank in ranks)
            answer = {"step_s": seconds, "boundaries": answer.pop("boundaries", []), "ranks": ranks}
        print(json.dumps(answer), flush=True)
    if peer is not None:
        cast("IO[str]", peer.stdin).close()
        peer.wait()


def _start_peer(port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *sys.argv, "--rank", "1", "--port", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _tell(peer: subprocess.Popen[str], line: str) -> None:
    pipe = cast("IO[str]", peer.stdin)
    pipe.write(line)
    pipe.flush()


def _line_of(peer: subprocess.Popen[str]) -> str:
    line = cast("IO[str]", peer.stdout).readline()
    if not line:
        raise SystemExit("rank 1 ended before its step was done; see its error above")
    return line


def _idle_bytes(side: Side) -> int:
    """Return the resident memory of the process with weights, but without memory of a step."""
    from sppo.kernels.native.process_memory import resident_bytes

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    side.trim()
    return resident_bytes() - side.gradient_bytes


def _measured_step(side: Side, *, idle: int) -> dict[str, Any]:
    import torch.distributed as dist

    from sppo.kernels.native.process_memory import peak_resident_bytes, reset_peak

    reset_peak()
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    side.step()
    cpu_s = time.process_time() - cpu_start
    dist.barrier()
    seconds = time.perf_counter() - start
    peak = peak_resident_bytes() - idle
    return {"step_s": seconds, "cpu_s": cpu_s, "peak_bytes": peak, **side.findings()}


def _build(arguments: argparse.Namespace) -> Side:
    import torch
    from sppo_pipeline import SppoPipeline, run_of  # beside this file
    from torch_pipeline import TorchPipeline  # beside this file

    sequences = int(arguments.sequences)
    generator = torch.Generator().manual_seed(0)
    shape = (sequences, arguments.length + 1)
    tokens = torch.randint(MODEL["vocab_size"], shape, generator=generator)
    run = run_of(
        MODEL,
        length=arguments.length,
        num_subsequences=arguments.subsequences,
        sequences=sequences,
        ranks=RANKS,
        schedule=arguments.schedule,
        partition=arguments.partition,
    )
    if arguments.worker == "sppo":
        return SppoPipeline(run, tokens, rank=arguments.rank)
    return TorchPipeline(run.model, tokens, rank=arguments.rank, pool=arguments.pool_for_torch)


def _print(case: Case) -> None:
    print(f"\n{case.sequences} x {case.length_tokens} tokens, cut at {case.boundaries}")
    print(f"{'side':<16} {'step s':>8} {'tokens/s':>9} {'peak MiB by rank':>17} ", end="")
    print(f"{'busy by rank':>13} {'loss':>8}")
    for m in case.sides:
        peaks = " ".join(f"{peak / 2**20:.0f}" for peak in m.peak_bytes)
        shares = " ".join(f"{share:.2f}" for share in m.cpu_share)
        row = f"{m.step_s:>8.2f} {m.tokens_per_s:>9.0f} {peaks:>17} {shares:>13} {m.loss:>8.4f}"
        print(f"{m.side + ' ' + m.schedule:<16} {row}")
    ratios = " ".join(f"{ratio:.3f}" for ratio in case.peak_ratio)
    print(
        f"sppo / torch: tokens/s {case.speedup:.3f}, peak memory by rank {ratios}; losses and "
        f"gradient norms within {case.largest_difference:.2%}"
    )
    ours = case.sides[0]
    print(
        f"idle share of SPPO's ranks: {ours.bubble_fraction:.3f} measured, "
        f"{ours.planned_bubble_fraction:.3f} planned (simulated, analytic rates)\n",
        flush=True,
    )


def _write_report(path: Path, cases: list[Case]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "setting": f"{RANKS} pipeline ranks, one thread each, gloo on loopback; bf16",
        "torch": version("torch"),
        "command": shlex.join(["bash", "scripts/compare_pipelining.sh", *sys.argv[1:]]),
        "model": MODEL,
        "provenance": "measured; planned_bubble_fraction is simulated with analytic rates",
        "cases": [asdict(case) for case in cases],
    }
    write_text(path, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
