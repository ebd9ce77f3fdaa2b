"""Compare memory and time of offloading saved activations to a disk with retaining them, on a CPU.

Two processes train the same Llama-shaped model in bf16 on the same tokens: one with
``activations.policy=retain``, the other with ``--policy`` and offloading to ``--disk``. They
alternate step by step. ``--plot`` draws the resident memory over the steps of each.

    OMP_WAIT_POLICY=passive python -m experiments.offload --disk . --plot offload.png
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments import harness

SAMPLE_S = 0.05
SIDES = {"retain": "retained", "offload": "offloaded to the disk"}
"""Names in the plot by side."""


def main() -> None:
    """Run both sides in turns, report."""
    parser = harness.parser(__doc__)
    parser.add_argument("--disk", type=Path, default=Path(), help="directory on the disk")
    parser.add_argument("--policy", default="offload_all", help="of the side that offloads")
    parser.add_argument("--length", type=harness.positive, default=32768, help="of a sequence")
    parser.add_argument("--subsequences", type=harness.positive, default=16, help="of a sequence")
    parser.add_argument("--steps", type=harness.positive, default=3, help="measured, of each side")
    parser.add_argument("--threads", type=harness.positive, default=os.cpu_count() or 1)
    parser.add_argument("--plot", type=harness.plot_file, help="draw memory over time, as PNG")
    options = parser.parse_args()
    if not options.disk.is_dir():
        parser.error(f"--disk {options.disk}: there is no such directory; name one on the disk")
    sides = {
        side: harness.Side(side, _make, (side, options), threads=options.threads) for side in SIDES
    }
    turns = harness.take_turns(sides, turns=options.steps + 1)
    answers = {side: [answer for (answer,) in found] for side, found in turns.items()}
    found = figures({side: steps[1:] for side, steps in answers.items()})  # the first warms up
    print_figures(found)
    about = {"length_tokens": options.length, "num_subsequences": options.subsequences}
    harness.write_report(options.output, {**harness.header(), **about, **found})
    if options.plot is not None:
        draw(answers, options.plot)


def _make(_rank: int, arguments: tuple[str, argparse.Namespace]) -> Callable[[], dict[str, Any]]:
    """Build one side, as ``sppo train`` does."""
    from experiments.planned_rank import PlannedRank

    side, options = arguments
    activations = {"policy": "retain"}
    if side == "offload":
        activations = {"policy": options.policy, "disk": str(options.disk.resolve())}
    keys = {
        "model": harness.MODEL,
        "sequence": {"length": options.length, "num_subsequences": options.subsequences},
        "activations": activations,
    }
    return partial(_measured, PlannedRank(keys, updates=True), harness.Meter())


def _measured(rank: Any, meter: harness.Meter) -> dict[str, Any]:
    samples = _Samples()
    with samples:
        measured = meter.measure(rank.step)
    copies = rank.state.engine.take_copies()
    return {
        **measured,
        "loss": rank.loss(),
        "exposed_s": copies.exposed_s,
        "out_bytes": copies.total_out_bytes,
        "out_bytes_per_s": copies.out_bytes_per_s,
        "back_bytes_per_s": copies.back_bytes_per_s,
        "samples": samples.taken,
    }


class _Samples:
    """Context that samples the resident memory during a step, above that at its beginning."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        from sppo.kernels.native.process_memory import resident_bytes

        start, idle_bytes = time.perf_counter(), resident_bytes()
        while not self._stop.wait(SAMPLE_S):
            self.taken.append((time.perf_counter() - start, resident_bytes() - idle_bytes))


def figures(answers: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians of each side, and how both compare."""
    sides = {
        side: {
            **{key: value for key, value in steps[-1].items() if key != "samples"},
            "step_s": statistics.median(step["step_s"] for step in steps),
            "exposed_s": statistics.median(step["exposed_s"] for step in steps),
            "peak_bytes": max(step["peak_bytes"] for step in steps),
            "steps_s": [step["step_s"] for step in steps],
        }
        for side, steps in answers.items()
    }
    retained, offloaded = sides["retain"], sides["offload"]
    return {
        "sides": sides,
        "peak_ratio": offloaded["peak_bytes"] / retained["peak_bytes"],
        "step_ratio": offloaded["step_s"] / retained["step_s"],
        "same_loss": offloaded["loss"] == retained["loss"],
    }


def print_figures(found: Mapping[str, Any]) -> None:
    """Print a row for each side, and how both compare."""
    harness.print_table(
        ("side", "step", "waits", "peak", "offloaded", "out", "back"),
        [
            (
                side,
                f"{row['step_s']:.2f} s",
                f"{row['exposed_s']:.3f} s",
                f"{row['peak_bytes'] / 2**20:.0f} MiB",
                f"{row['out_bytes'] / 2**20:.0f} MiB",
                f"{row['out_bytes_per_s'] / 1e9:.2f} GB/s",
                f"{row['back_bytes_per_s'] / 1e9:.2f} GB/s",
            )
            for side, row in found["sides"].items()
        ],
    )
    print(
        f"offload / retain: peak memory {found['peak_ratio']:.3f}, step time "
        f"{found['step_ratio']:.3f}; losses {'equal' if found['same_loss'] else 'NOT equal'}"
    )


def draw(answers: Mapping[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """Plot the memory over all steps of each side, without the other side's turns in between."""
    from matplotlib.figure import Figure

    from sppo.output_file import write_figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    for side, label in SIDES.items():
        points, before_s = [(0.0, 0)], 0.0
        for step in answers[side]:
            points += [(before_s + seconds, held) for seconds, held in step["samples"]]
            before_s += step["step_s"]
        seconds, held = zip(*points, strict=True)
        axes.plot(seconds, [size / 2**20 for size in held], label=label)
    axes.set_xlabel(f"seconds of the {len(answers['retain'])} steps of each side")
    axes.set_ylabel("resident memory above idle (MiB)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    write_figure(path, figure, dpi=150)


if __name__ == "__main__":
    main()
