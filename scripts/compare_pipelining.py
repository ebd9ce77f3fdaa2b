"""SPPO beside torch.distributed.pipelining: two pipeline ranks each, on the CPU.

Both sides do the forward and backward of a step of the same Llama-shaped model in bf16, with the
same weights, tokens and tiled loss, and rebuild nothing. A rank is a process with one thread, and
ranks talk over gloo. One side has one sequence in N subsequences; the other takes whole sequences
as micro-batches, by GPipe if there is one and by 1F1B if there are more. The two sides take turns
step by step, so that noise of the machine falls on both; the one that waits sleeps. Run by
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

from turns import take_turns  # beside this file

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
WARM_UP_TOKENS = 512
LARGEST_DIFFERENCE = 0.02
"""Of losses, and of norms of gradients: both sides round to bf16, in different places."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One side at one number of sequences; lists have an entry per rank."""

    side: str
    schedule: str
    step_s: float
    """Median over the steps, from a barrier to a barrier."""
    tokens_per_s: float
    peak_bytes: list[int]
    """Most resident memory above the idle process, which holds weights and no gradients."""
    cpu_share: list[float]
    """Processor time over step time: what is missing to 1 was spent waiting."""
    loss: float
    gradient_norm: list[float]
    bubble_fraction: float | None
    """Measured: idle share of all ranks in the executed trace; None where there is no trace."""
    planned_bubble_fraction: float | None
    """Simulated, with analytic rates."""


@dataclass(frozen=True, slots=True)
class Case:
    """Both sides at one number of sequences."""

    length_tokens: int
    sequences: int
    boundaries: list[int]
    sides: list[Measurement]
    speedup: float
    """Of SPPO's tokens/s over torch's."""
    peak_ratio: list[float]
    """SPPO's peak over torch's, of each rank."""
    largest_difference: float
    """Of loss and gradient norms, relative."""


class Side(Protocol):
    """One rank of one side."""

    @property
    def gradient_bytes(self) -> int:
        """Of gradients that lie there between steps; they count as the step's."""
        ...

    def warm_up(self) -> None:
        """Load and compile what the first step would."""
        ...

    def step(self) -> None:
        """Forward and backward of all sequences."""
        ...

    def findings(self) -> dict[str, Any]:
        """Of the last step, from outside its time."""
        ...


def main() -> None:
    """Parse arguments, compare, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=32768, help="tokens of a sequence")
    parser.add_argument("--pieces", type=int, default=8, help="subsequences (N)")
    parser.add_argument("--sequences", default="1,2,4", help="per step, comma-separated")
    parser.add_argument("--steps", type=int, default=1, help="measured steps of each side")
    parser.add_argument("--partition", default="flops", help="sequence.partition of SPPO's side")
    parser.add_argument("--schedule", default="auto", help="parallel.schedule of SPPO's side")
    parser.add_argument(
        "--pool-for-torch", action="store_true", help="SPPO's memory pool for torch's side too"
    )
    parser.add_argument("--output", type=Path, help="write the measurements here as JSON")
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
    """Start both sides, and let them take turns."""
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
    """Of all steps of one side; an answer lists what its ranks found."""
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
    """Worker: one rank of one side, which answers each line on stdin with one measured step.

    Rank 0 starts the other one, hands its lines on and adds the other's answers to its own.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from sppo.train.process_memory import resident_bytes

    torch.set_num_threads(1)
    first = arguments.rank == 0
    store = TCPStore("127.0.0.1", arguments.port, is_master=first, timeout=TIMEOUT)
    peer = _start_peer(store.port) if first else None
    dist.init_process_group(
        "gloo", store=store, rank=arguments.rank, world_size=RANKS, timeout=TIMEOUT
    )
    side = _build(arguments)
    side.warm_up()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    idle = resident_bytes() - side.gradient_bytes
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


def _measured_step(side: Side, *, idle: int) -> dict[str, Any]:
    import torch.distributed as dist

    from sppo.train.process_memory import peak_resident_bytes, reset_peak

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

    sequences = int(arguments.sequences)
    generator = torch.Generator().manual_seed(0)
    shape = (sequences, arguments.length + 1)
    tokens = torch.randint(MODEL["vocab_size"], shape, generator=generator)
    return (_Sppo if arguments.worker == "sppo" else _Torch)(tokens, arguments)


def _weights(model: Any) -> dict[str, Any]:
    from sppo.model.initialize import initial_weights

    return {name: weight.bfloat16() for name, weight in initial_weights(model, seed=0).items()}


class _Sppo:
    """A rank of our pipeline, as ``sppo train`` sets it up under ``retain``."""

    def __init__(self, tokens: Any, arguments: argparse.Namespace) -> None:
        from sppo.config import check_run
        from sppo.engine.engine import Engine
        from sppo.kernels.cpu_allocator import install_cpu_allocator
        from sppo.model.gradients import zero_gradients
        from sppo.planning.parameters import stage_shapes
        from sppo.planning.run_plan import plan_run
        from sppo.planning.this_machine import detect_machine, usable_memory_bytes

        install_cpu_allocator()  # as `sppo train` does
        self._tokens = tokens
        self._run = check_run(_run_of(arguments), source="scripts/compare_pipelining.py")
        self._plan = plan_run(
            self._run, hardware=detect_machine(), available_bytes=usable_memory_bytes()
        )
        model, pipeline = self._run.model, _pipeline(self._plan.schedule, rank=arguments.rank)
        names = stage_shapes(model, pipeline.layers(model.num_layers)[arguments.rank])
        weights = {name: weight for name, weight in _weights(model).items() if name in names}
        self._gradients = zero_gradients(weights)
        self._engine = Engine(
            model, weights=weights, gradients=self._gradients, policy="retain", pipeline=pipeline
        )
        self._done: Any = None

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient.nbytes for gradient in self._gradients.values())

    def warm_up(self) -> None:
        from sppo.train.warm_up import warm_up

        warm_up(self._run, lengths=self._plan.lengths)
        tokens = self._tokens[:, : WARM_UP_TOKENS + 1]
        self._accumulate(tokens, (0, tokens.shape[1] - 1))

    def step(self) -> None:
        self._done = self._accumulate(self._tokens, self._plan.boundaries)

    def _accumulate(self, tokens: Any, cuts: tuple[int, ...]) -> Any:
        import torch

        from sppo.engine.unit import SequenceData

        torch._foreach_zero_(list(self._gradients.values()))
        data = [SequenceData(row[:-1], row[1:]) for row in tokens]
        return self._engine.accumulate(data, [cuts] * len(data))

    def findings(self) -> dict[str, Any]:
        import torch

        done = self._done
        busy_s = sum(e.finish_s - e.start_s for e in done.trace if e.action.kind in ("F", "B", "W"))
        norms = torch._foreach_norm(list(self._gradients.values()))
        return {
            "schedule": self._plan.schedule,
            "boundaries": list(self._plan.boundaries),
            "planned_bubble_fraction": self._plan.predicted.bubble_fraction,
            "busy_s": busy_s,
            "loss": float(done.total_loss) / done.num_valid,
            "gradient_norm": float(torch.stack(norms).norm()),
        }


def _run_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": MODEL,
        "data": {"tokens": "."},
        "sequence": {
            "length": arguments.length,
            "num_subsequences": arguments.pieces,
            "partition": arguments.partition,
        },
        "parallel": {"pipeline_parallel_degree": RANKS, "schedule": arguments.schedule},
        "activations": {"policy": "retain"},
        "train": {"dtype": "bf16", "sequences_per_step": int(arguments.sequences)},
    }


def _pipeline(schedule: str, *, rank: int) -> Any:
    import torch

    from sppo.engine.pipeline import Pipeline
    from sppo.parallel.mesh import Mesh, MeshShape
    from sppo.parallel.pipeline_p2p import PipelineLinks

    shape = MeshShape(pipeline_parallel=RANKS)
    mesh = Mesh(shape, rank=rank, timeout_s=TIMEOUT.total_seconds())
    links = PipelineLinks(mesh, device=torch.device("cpu"))
    return Pipeline(schedule, RANKS, rank, courier=links)


class _Torch:
    """A rank of torch's pipeline."""

    def __init__(self, tokens: Any, arguments: argparse.Namespace) -> None:
        from torch_pipeline import TorchPipeline  # beside this file

        from sppo.config import ModelConfig
        from sppo.kernels.cpu_allocator import install_cpu_allocator

        if arguments.pool_for_torch:
            install_cpu_allocator()
        model = ModelConfig(**MODEL)
        self._tokens, self._loss = tokens, 0.0
        self._pipeline = TorchPipeline(model, _weights(model), rank=arguments.rank)

    gradient_bytes = 0
    """They are made in the step."""

    def warm_up(self) -> None:
        tokens = self._tokens[:, : WARM_UP_TOKENS + 1]
        self._pipeline.step(tokens[:, :-1], tokens[:, 1:])
        self._pipeline.forget_gradients()

    def step(self) -> None:
        self._loss = self._pipeline.step(self._tokens[:, :-1], self._tokens[:, 1:])

    def findings(self) -> dict[str, Any]:
        found = {
            "schedule": self._pipeline.schedule_name(len(self._tokens)),
            "loss": self._loss,
            "gradient_norm": self._pipeline.gradient_norm(),
        }
        self._pipeline.forget_gradients()
        return found


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
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
