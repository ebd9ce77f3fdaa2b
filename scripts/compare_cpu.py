"""Compare step time and memory of SPPO with transformers on the CPU.

Both sides train the same Llama-shaped model in bf16 on the same tokens, with the same tiled loss
and the same AdamW over fp32 master weights. Each side is a separate process, so that peak memory is
measured per side. The sides alternate step by step, so that noise of the machine affects both. Run
by ``scripts/compare_cpu.sh``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from option_types import output_file
from transformers_training import TransformersTraining
from turns import take_turns  # beside this file

from sppo.output_file import write_text
from sppo.schedule.transfers.kv_placement import KVPlacement

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 4096, 512, 6, 8, 2, 1792
SIDES = ("sppo retain", "transformers", "sppo keep_attention", "transformers checkpointing")


@dataclass(frozen=True, slots=True)
class SppoSide:
    """Settings of SPPO on one side."""

    policy: str
    """Activation policy; offload_all needs a disk."""
    input_every: int = 1
    """Number of layers that share a saved input."""
    virtual_stages: int = 1
    """Number of stages of the single rank, run in the looped order."""
    kv: KVPlacement = "retained"
    """Placement of K and V between the forward and the backward of a stage."""


PAIRS = (
    ("sppo retain", "transformers"),
    ("sppo keep_attention", "transformers checkpointing"),
    ("sppo looped", "sppo keep_attention"),
    ("sppo looped disk", "sppo disk"),
    ("sppo looped disk", "transformers checkpointing"),
)
"""Pairs of sides whose ratios are printed."""
SPPO_SIDES = {
    "sppo retain": SppoSide("retain"),
    "sppo keep_attention": SppoSide("keep_attention", input_every=3),
    "sppo looped": SppoSide("keep_attention", virtual_stages=LAYERS, kv="recomputed"),
    "sppo disk": SppoSide("offload_all"),
    "sppo looped disk": SppoSide("offload_all", virtual_stages=LAYERS, kv="offloaded"),
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of one side at one length."""

    side: str
    length_tokens: int
    step_s: float
    """Median over the measured steps."""
    peak_bytes: int
    """Largest resident memory during a step, minus that of the process before its first step."""
    loss: float


class Trainer(Protocol):
    """Interface of a side: a model, an optimizer, and a step."""

    def step(self) -> float:
        """Run one training step and return the loss."""
        ...


def main() -> None:
    """Parse arguments, run the sides, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="16384", help="comma-separated sequence lengths")
    parser.add_argument(
        "--steps", type=int, default=5, help="measured steps of each side; 0 times the first one"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sides", default=",".join(SIDES), help="which sides, comma-separated")
    parser.add_argument("--disk", type=Path, help="directory on a disk, for sides that offload")
    parser.add_argument("--output", type=output_file, help="write the measurements here as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        import torch

        torch.set_num_threads(arguments.threads)
        _serve(_build(arguments.worker, int(arguments.lengths), disk=arguments.disk))
        return
    sides = arguments.sides.split(",")
    _check_sides(sides, disk=arguments.disk)
    measurements: list[Measurement] = []
    for length in (int(text) for text in arguments.lengths.split(",")):
        measurements += compare(
            sides, length, steps=arguments.steps, threads=arguments.threads, disk=arguments.disk
        )
        _print_table([m for m in measurements if m.length_tokens == length])
        if arguments.output is not None:
            _write_report(arguments.output, measurements, threads=arguments.threads)
    for side in sides:
        _print_growth([m for m in measurements if m.side == side])


def _write_report(path: Path, measurements: list[Measurement], *, threads: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()} CPU, {threads} threads",
        "command": shlex.join(["bash", "scripts/compare_cpu.sh", *sys.argv[1:]]),
        "measurements": [asdict(m) for m in measurements],
    }
    write_text(path, json.dumps(report, indent=1) + "\n")


def _check_sides(sides: list[str], *, disk: Path | None) -> None:
    """End with an error if a side does not exist or lacks its disk."""
    known = [*SPPO_SIDES, *(side for side in SIDES if side not in SPPO_SIDES)]
    for side in sides:
        if side not in known:
            sys.exit(f"error: side {side!r} is not one of: {', '.join(known)}")
        offloads = side in SPPO_SIDES and SPPO_SIDES[side].policy == "offload_all"
        if offloads and (disk is None or not disk.is_dir()):
            sys.exit(f"error: side {side!r} offloads: name a directory with --disk DIR")


def compare(
    sides: list[str], length: int, *, steps: int, threads: int, disk: Path | None = None
) -> list[Measurement]:
    """Run the steps of all sides in turns; the first turn is a warm-up if there are more."""
    options = ["--lengths", str(length), "--threads", str(threads)]
    if disk is not None:
        options += ["--disk", str(disk)]
    commands = {side: [__file__, "--worker", side, *options] for side in sides}
    results = take_turns(commands, turns=steps + 1, threads=threads, label=f"{length} ")
    return [
        Measurement(
            side,
            length,
            statistics.median(answer["step_s"] for answer in answers[1:] or answers),
            max(answer["peak_bytes"] for answer in answers),
            answers[-1]["loss"],
        )
        for side, answers in results.items()
    ]


def _serve(trainer: Trainer) -> None:
    """Answer each line on stdin with one measured step, as a worker process."""
    from sppo.kernels.native.process_memory import peak_resident_bytes, reset_peak, resident_bytes

    idle = resident_bytes()
    print("ready", flush=True)
    for _ in sys.stdin:
        reset_peak()
        start = time.perf_counter()
        loss = trainer.step()
        seconds = time.perf_counter() - start
        peak = peak_resident_bytes() - idle
        print(json.dumps({"step_s": seconds, "peak_bytes": peak, "loss": loss}), flush=True)


def _build(side: str, length: int, *, disk: Path | None) -> Trainer:
    """Build one side: its model, optimizer and engine."""
    import torch

    tokens = torch.randint(VOCAB, (length + 1,), generator=torch.Generator().manual_seed(0))
    if side in SPPO_SIDES:
        return _Sppo(tokens, SPPO_SIDES[side], disk=disk)
    return _transformers(tokens, checkpointing=side.endswith("checkpointing"))


class _Sppo:
    def __init__(self, tokens: Any, side: SppoSide, *, disk: Path | None) -> None:
        import torch

        from sppo.activations.policy import policy_placement
        from sppo.activations.subsequence_placement import SubsequencePlacement
        from sppo.config import ModelConfig
        from sppo.config.run import OptimizerConfig
        from sppo.engine.engine import Engine
        from sppo.engine.pipeline import Pipeline
        from sppo.engine.unit import SequenceData
        from sppo.kernels.native.cpu_allocator import install_cpu_allocator
        from sppo.model.gradients import zero_gradients
        from sppo.model.initialize import initial_weights
        from sppo.offload.offload_store import OffloadStore
        from sppo.offload.queues.thread_queues import ThreadQueues
        from sppo.optim.adamw import AdamW
        from sppo.planning.partition import automatic_num_subsequences, boundaries_by_length

        install_cpu_allocator()  # as `sppo train` does
        model = ModelConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_layers=LAYERS,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            mlp_size=MLP,
        )
        length = len(tokens) - 1
        num_subsequences = automatic_num_subsequences(length, target_tokens=2048)
        self._cuts = boundaries_by_length(length, num_subsequences=num_subsequences, alignment=128)
        self._data = SequenceData(tokens[:-1], tokens[1:])
        weights = {
            name: weight.bfloat16() for name, weight in initial_weights(model, seed=0).items()
        }
        self._gradients = zero_gradients(weights)

        def offload_all(lengths: tuple[int, ...]) -> tuple[SubsequencePlacement, ...]:
            nothing = (0, 0, 0)
            return tuple(SubsequencePlacement(nothing, (n, n, n), nothing) for n in lengths)

        offloads = side.policy == "offload_all"
        placement = offload_all if offloads else policy_placement(side.policy)
        # Compute waits for each copy out, as `sppo train` does on a CPU.
        store = OffloadStore(ThreadQueues(), disk=disk, source_lag=0) if offloads else None
        looped, others = side.virtual_stages > 1, range(side.virtual_stages - 1)
        self._engine = Engine(
            model,
            weights=weights,
            gradients=self._gradients,
            placements=dict.fromkeys(range(side.virtual_stages), placement),
            offloaded=store,
            kv_offloaded=others if side.kv == "offloaded" else (),
            kv_recomputed=others if side.kv == "recomputed" else (),
            input_every=side.input_every,
            pipeline=Pipeline("looped_bfs" if looped else "sppo", num_virtual=side.virtual_stages),
        )
        self._optimizer = AdamW(weights, config=OptimizerConfig())
        self._torch = torch

    def step(self) -> float:
        self._torch._foreach_zero_(list(self._gradients.values()))
        done = self._engine.accumulate([self._data], [self._cuts])
        self._optimizer.step(self._gradients, lr=3e-4)
        return float(done.total_loss) / done.num_valid


def _transformers(tokens: Any, *, checkpointing: bool) -> Trainer:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=MLP,
        max_position_embeddings=len(tokens),
        tie_word_embeddings=False,
    )
    return TransformersTraining(config, tokens, checkpointing=checkpointing)


def _print_table(measurements: list[Measurement]) -> None:
    print(f"\n{'side':<28} {'tokens':>8} {'step s':>8} {'peak MiB':>9} {'loss':>7}")
    for m in measurements:
        row = f"{m.step_s:>8.2f} {m.peak_bytes / 2**20:>9.0f} {m.loss:>7.3f}"
        print(f"{m.side:<28} {m.length_tokens:>8} {row}")
    by_side = {m.side: m for m in measurements}
    for ours, theirs in PAIRS:
        if ours in by_side and theirs in by_side:
            a, b = by_side[ours], by_side[theirs]
            print(
                f"{ours} / {theirs}: time {a.step_s / b.step_s:.3f}, "
                f"peak memory {a.peak_bytes / b.peak_bytes:.3f}"
            )
    print(flush=True)


def _print_growth(measurements: list[Measurement]) -> None:
    """Print fits of a side over the sequence length: memory as a line, time as a·S + b·S².

    Least squares of relative errors, so that short and long lengths have equal weight. Prints
    nothing for fewer than three lengths, which would leave no residual.
    """
    import numpy as np

    if len(measurements) < 3:
        return
    tokens = np.array([m.length_tokens / 1024 for m in measurements])
    for name, values, terms in (
        ("time s", [m.step_s for m in measurements], (tokens, tokens**2)),
        (
            "peak MiB",
            [m.peak_bytes / 2**20 for m in measurements],
            (np.ones_like(tokens), tokens),
        ),
    ):
        measured = np.array(values)
        design = np.stack(terms, axis=1) / measured[:, None]
        fit, *_ = np.linalg.lstsq(design, np.ones_like(measured), rcond=None)
        worst = float(np.abs(design @ fit - 1).max())
        powers = ("S", "S²") if name == "time s" else ("1", "S")
        formula = " + ".join(f"{c:.4g}·{p}" for c, p in zip(fit, powers, strict=True))
        print(f"{measurements[0].side}: {name} = {formula} (S in Ki tokens), off by {worst:.1%}")


if __name__ == "__main__":
    main()
