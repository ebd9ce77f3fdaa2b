"""Compare memory and time of offloading saved activations to a disk with retaining them, on a CPU.

Two processes train the same Llama-shaped model in bf16 on the same tokens: one with
``activations.policy=retain``, the other with ``--policy`` and offloading to ``--disk``. They
alternate step by step, so that noise of the machine affects both. Prints a table, writes the
figures as JSON, and plots the resident memory over the steps of each.

    OMP_WAIT_POLICY=passive python scripts/offload_cpu.py --disk /tmp --length 4096 --subsequences 8
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from option_types import output_file, plot_file, positive  # beside this file
from turns import take_turns

from sppo.output_file import write_figure, write_text

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 2,
    "mlp_size": 1792,
}
SAMPLE_S = 0.05
SIDES = ("retain", "offload")


def main() -> None:
    """Parse arguments, run both sides in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", default=".", help="directory on the disk to offload to")
    parser.add_argument("--policy", default="offload_all", help="of the side that offloads")
    parser.add_argument("--ratio", help="activations.offload_ratio instead of a policy")
    parser.add_argument("--length", type=positive, default="32Ki", help="tokens of a sequence")
    parser.add_argument(
        "--subsequences", "--pieces", type=positive, default=16, help="of a sequence (N)"
    )
    parser.add_argument("--steps", type=positive, default=3, help="measured steps of each side")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=output_file, help="write the figures here as JSON")
    parser.add_argument(
        "--plot", "--picture", type=plot_file, help="draw memory over time here as PNG"
    )
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _serve(arguments)
        return
    if not Path(arguments.disk).is_dir():
        parser.error(f"--disk {arguments.disk}: there is no such directory; name one on the disk")
    answers = _take_turns(arguments)
    report = _report(arguments, {side: found[1:] for side, found in answers.items()})
    _print(report)
    if arguments.output is not None:
        write_text(arguments.output, json.dumps(report, indent=1) + "\n")
    if arguments.plot is not None:
        _draw(answers, arguments.plot)


def _take_turns(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the answers of both sides; the first step of each is a warm-up."""
    commands = {side: [__file__, *sys.argv[1:], "--worker", side] for side in SIDES}
    return take_turns(commands, turns=arguments.steps + 1, threads=arguments.threads)


def _serve(arguments: argparse.Namespace) -> None:
    """Build one side and answer each line on stdin with one measured step, as a worker process."""
    import torch

    from sppo.config import check_run
    from sppo.engine.unit import SequenceData
    from sppo.hardware.this_machine import detect_machine
    from sppo.kernels.native.cpu_allocator import install_cpu_allocator
    from sppo.kernels.native.machine_memory import memory_room
    from sppo.kernels.native.process_memory import peak_resident_bytes, reset_peak, resident_bytes
    from sppo.offload.disk.disk_room import usable_directory
    from sppo.planning.run_plan import plan_run
    from sppo.training.job import Job
    from sppo.training.state import build_state
    from sppo.training.steps.warm_up import warm_up

    install_cpu_allocator()  # as `sppo train` does
    torch.set_num_threads(arguments.threads)
    run = check_run(_run_of(arguments), source="scripts/offload_cpu.py")
    plan = plan_run(
        run,
        hardware=detect_machine(),
        available_bytes=memory_room().least_bytes,
        disk_bytes=usable_directory(Path(arguments.disk)).usable_bytes,
    )
    warm_up(run, lengths=plan.lengths)
    bare = resident_bytes()
    state = build_state(Job.alone(run), plan)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(MODEL["vocab_size"], (arguments.length + 1,), generator=generator)
    data = SequenceData(tokens[:-1], tokens[1:])
    idle = resident_bytes()
    print("ready", flush=True)
    for _ in sys.stdin:
        reset_peak()
        with _Sampler(resident_bytes, above=idle) as sampler:
            torch._foreach_zero_(list(state.gradients.values()))
            done = state.engine.accumulate([data], [plan.boundaries])
            state.optimizer.step(state.gradients, lr=3e-4)
        copies = state.engine.take_copies()
        answer = {
            "step_s": sampler.seconds,
            "peak_bytes": peak_resident_bytes() - idle,
            "peak_above_bare_bytes": peak_resident_bytes() - bare,
            "predicted_peak_bytes": plan.predicted.device_peak_bytes,
            "loss": float(done.total_loss) / done.num_valid,
            "exposed_s": copies.exposed_s,
            "out_bytes": copies.total_out_bytes,
            "out_bytes_per_s": copies.out_bytes_per_s,
            "back_bytes_per_s": copies.back_bytes_per_s,
            "samples": sampler.samples,
        }
        print(json.dumps(answer), flush=True)
    state.close()


def _run_of(arguments: argparse.Namespace) -> dict[str, Any]:
    activations: dict[str, Any] = {"policy": "retain"}
    if arguments.worker == "offload":
        activations = {"policy": arguments.policy, "disk": arguments.disk}
        if arguments.ratio is not None:
            activations = {"offload_ratio": float(arguments.ratio), "disk": arguments.disk}
    return {
        "model": MODEL,
        "data": {"tokens": "."},
        "sequence": {"length": arguments.length, "num_subsequences": arguments.subsequences},
        "activations": activations,
        "train": {"dtype": "bf16"},
    }


class _Sampler:
    """Context that samples the resident memory every 50 ms during a step."""

    def __init__(self, read: Any, *, above: int) -> None:
        self._read, self._above = read, above
        self._stop = threading.Event()
        self.samples: list[tuple[float, int]] = []
        self.seconds = 0.0

    def __enter__(self) -> _Sampler:
        self._start = time.perf_counter()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            seconds = time.perf_counter() - self._start
            self.samples.append((round(seconds, 3), self._read() - self._above))


def _report(
    arguments: argparse.Namespace, answers: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the medians of each side, and the ratios of both."""
    sides = {
        side: {
            **{key: value for key, value in found[-1].items() if key != "samples"},
            "step_s": statistics.median(answer["step_s"] for answer in found),
            "exposed_s": statistics.median(answer["exposed_s"] for answer in found),
            "peak_bytes": max(answer["peak_bytes"] for answer in found),
            "steps_s": [round(answer["step_s"], 3) for answer in found],
        }
        for side, found in answers.items()
    }
    retained, offloaded = sides["retain"], sides["offload"]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()} CPU, {arguments.threads} threads",
        "command": shlex.join(["python", "scripts/offload_cpu.py", *sys.argv[1:]]),
        "length_tokens": arguments.length,
        "num_subsequences": arguments.subsequences,
        "sides": sides,
        "peak_ratio": offloaded["peak_bytes"] / retained["peak_bytes"],
        "step_ratio": offloaded["step_s"] / retained["step_s"],
        "difference_s": offloaded["step_s"] - retained["step_s"],
        "same_loss": offloaded["loss"] == retained["loss"],
    }


def _print(report: dict[str, Any]) -> None:
    print(f"\n{'side':<8} {'step s':>8} {'waits s':>8} {'peak MiB':>9} {'out GB/s':>9} {'back':>6}")
    for side, found in report["sides"].items():
        rates = f"{found['out_bytes_per_s'] / 1e9:>9.2f} {found['back_bytes_per_s'] / 1e9:>6.2f}"
        peak = found["peak_bytes"] / 2**20
        print(f"{side:<8} {found['step_s']:>8.2f} {found['exposed_s']:>8.3f} {peak:>9.0f} {rates}")
    offloaded = report["sides"]["offload"]
    print(
        f"offload / retain: peak memory above idle {report['peak_ratio']:.3f}, step time "
        f"{report['step_ratio']:.3f} ({report['difference_s']:+.2f} s, of which waiting "
        f"{offloaded['exposed_s']:.3f} s); {offloaded['out_bytes'] / 2**20:.0f} MiB offloaded; "
        f"losses {'equal' if report['same_loss'] else 'NOT equal'}"
    )
    for side, found in report["sides"].items():
        ratio = found["peak_above_bare_bytes"] / found["predicted_peak_bytes"]
        print(f"{side}: measured peak / predicted {ratio:.3f}")


def _draw(answers: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Plot the memory over all steps of each side, without the other side's turns in between."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    for side, label in zip(SIDES, ("retained", "offloaded to the disk"), strict=True):
        points, before_s = [(0.0, 0)], 0.0
        for answer in answers[side]:
            points += [(before_s + seconds, held) for seconds, held in answer["samples"]]
            before_s += answer["step_s"]
        seconds, held = zip(*points, strict=True)
        axes.plot(seconds, [value / 2**20 for value in held], label=label)
    axes.set_xlabel(f"seconds of the {len(answers[SIDES[0]])} steps of each side")
    axes.set_ylabel("resident memory above idle (MiB)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    write_figure(path, figure, dpi=150)


if __name__ == "__main__":
    main()
