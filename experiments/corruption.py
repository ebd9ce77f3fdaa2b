"""Measure the watch for silent corruption: flipped bits that it finds, false alarms, and its cost.

*flips*: in each step of a training, after the first ones, random bits of random elements of random
gradients are flipped, one at a time, after the step was computed, and the watch is asked whether
the step stands out. A step that stands out is computed again, which shows the flip. Counted are
flips that change the norm of all gradients by more than 1e-3. Bits of weights are flipped as well.

*ordinary*: trainings without flips, on the stream and on documents of 16 to 2048 tokens:
steps computed again, and steps whose second computation differed.

*cost*: seconds of the watch as a share of those of a step, in the training of the quickstart.

    OMP_NUM_THREADS=1 python -m experiments.corruption --output docs/results/corruption_watch.json
"""

from __future__ import annotations

import argparse
import random
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from experiments import harness
from sppo.config.loading import check_run
from sppo.config.run import RunConfig
from sppo.optim.gradient_norm import global_norm
from sppo.optim.sharded_state import ShardedState
from sppo.training import trainer
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.interruption import CorruptionError
from sppo.training.job import Job
from sppo.training.preflight import preflight
from sppo.training.watch import corruption
from sppo.training.watch.computed import Computed
from sppo.training.watch.corruption import Watch
from sppo.training.watch.usual import EFFECT

PACKAGES = ("asyncio", "email", "html", "http", "importlib", "json", "logging", "unittest", "xml")
"""Packages of Python's standard library whose source is the training text."""
LONGEST = 2048
SMALL = {"preset": "tiny", "hidden_size": 128, "num_heads": 2, "num_kv_heads": 2, "mlp_size": 352}
HISTORY = 40
"""Steps before the first flip."""
COUNTED = ("recomputed", "differed")


def main() -> None:
    """Prepare the text, run all trainings, report."""
    options = _options()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work)
        report = {
            **harness.header(),
            "flips": flips(work, steps=options.flip_steps, per_step=options.flips_per_step),
            "ordinary": {
                "stream": ordinary(work, options.steps, **_STREAM),
                "documents": ordinary(work, options.steps, **_DOCUMENTS),
            },
            "cost": cost(work, steps=options.cost_steps),
        }
    harness.write_report(options.output, report)
    _print(report)


_STREAM: dict[str, Any] = {
    "data": {"tokens": "stream"},
    "sequence": {"length": 512, "num_subsequences": 2},
}
_DOCUMENTS: dict[str, Any] = {
    "data": {"tokens": "documents", "samples": "documents"},
    "sequence": {"length": LONGEST, "num_subsequences": 2},
    "train": {"samples_per_step": 1},
}


def _options() -> argparse.Namespace:
    made = harness.parser(__doc__)
    made.add_argument("--flip-steps", type=harness.positive, default=20)
    made.add_argument("--flips-per-step", type=harness.positive, default=200)
    made.add_argument("--steps", type=harness.positive, default=1000, help="of each ordinary run")
    made.add_argument("--cost-steps", type=harness.positive, default=5)
    return made.parse_args()


# Trainings


def prepare(work: Path) -> None:
    """Write the text as one token stream, and as documents whose lengths are log-uniform."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [library / name for name in PACKAGES if (library / name).exists()]
    prepare = "data", "prepare", "--tokenizer"
    harness.sppo(*prepare, "bytes", "--glob", "*.py", "--out", work / "stream", *paths)
    tokens = np.fromfile(work / "stream" / "tokens.bin", dtype="<u2").astype(np.int64)
    (work / "pieces").mkdir()
    drawn, begin, number = np.random.default_rng(0), 0, 0
    while begin + LONGEST < len(tokens):
        length = int(2 ** drawn.uniform(4, np.log2(LONGEST)))
        np.save(work / "pieces" / f"{number:06}.npy", tokens[begin : begin + length])
        begin, number = begin + length, number + 1
    harness.sppo(*prepare, "ids", "--out", work / "documents", work / "pieces")


def train(work: Path, **sections: Any) -> None:
    """Train in this process, without any report."""
    train_keys = {"dtype": "fp32", "output": tempfile.mkdtemp(dir=work), **sections.pop("train")}
    data = {**sections.pop("data")}
    data["tokens"] = str(work / data["tokens"])
    merged = {
        "optimizer": {"lr": 2e-3, "warmup_steps": 20},
        "checkpoint": {"every": 0, "at_end": False},
        **sections,
        "data": data,
        "train": train_keys,
    }
    run: RunConfig = check_run(merged, source="experiment")
    job = Job.alone(run, device=CpuDevice(), console=Console(quiet=True))
    trainer.train(preflight(job))


# Flips


def flips(work: Path, *, steps: int, per_step: int) -> dict[str, Any]:
    """Return how many flips of the quickstart's model were found, by tensor if any was missed."""
    drawn, counts, missed = random.Random(0), Counter[str](), Counter[str]()
    confirmed = Watch.confirmed

    def asked(watch: Watch, step: int, compute: Callable[[], Computed]) -> Computed:
        def struck() -> Computed:
            computed = compute()
            if step > HISTORY:
                for _ in range(per_step):
                    _flip_gradient(watch, computed, drawn, counts, missed)
                    _flip_weight(watch, drawn, counts)
            return computed

        return confirmed(watch, step, struck)

    with mock.patch.object(Watch, "confirmed", asked):
        train(
            work,
            model={"preset": "tiny"},
            **{**_STREAM, "sequence": {"length": 1024, "num_subsequences": 2}},
            train={"steps": HISTORY + steps},
        )
    return {
        "model": "tiny, 1Ki bytes a step",
        "gradients_flipped": steps * per_step,
        "with_effect": counts["with effect"],
        "found": counts["found"],
        "missed_by_tensor": dict(+missed),
        "without_effect_found": counts["without effect, found"],
        "weights_flipped": steps * per_step,
        "weights_found": counts["weights found"],
    }


def _flip_gradient(
    watch: Watch, computed: Computed, drawn: random.Random, counts: Counter[str], missed: Any
) -> None:
    """Flip one bit, count whether the step stands out if it matters, and flip the bit back."""
    gradients, before = computed.sums.gradients, computed.sums.norm
    name = drawn.choice([*gradients])
    with _flipped(gradients[name], drawn):
        norm = global_norm(gradients)
        after = replace(computed, norm=norm, sums=replace(computed.sums, norm=float(norm)))
        stands_out = bool(watch._standing_out(watch._figures(after), after))
    if not abs(float(norm) / before - 1) <= EFFECT:  # NaN, too
        counts["with effect"] += 1
        counts["found"] += stands_out
        missed[name] += not stands_out
    else:
        counts["without effect, found"] += stands_out


def _flip_weight(watch: Watch, drawn: random.Random, counts: Counter[str]) -> None:
    rows = watch._state.weights
    key = drawn.choice([*rows])
    with _flipped(rows[key], drawn):
        try:
            watch.check_weights(0)
        except CorruptionError as error:
            counts["weights found"] += key in str(error)


@contextmanager
def _flipped(tensor: Tensor, drawn: random.Random) -> Iterator[None]:
    index, bit = drawn.randrange(tensor.numel()), drawn.randrange(32)
    word = tensor.view(-1)[index : index + 1].view(torch.int32)
    mask = torch.tensor([1 << bit if bit < 31 else -(1 << 31)], dtype=torch.int32)
    word.bitwise_xor_(mask)
    yield
    word.bitwise_xor_(mask)


# Ordinary steps, and their cost


def ordinary(work: Path, steps: int, **sections: Any) -> dict[str, Any]:
    """Return how many steps of a training without flips were computed again, and differed."""
    differed, lines, compare = 0, list[str](), Watch._compare

    def compared(watch: Watch, step: int, first: Any, again: Any) -> None:
        nonlocal differed
        differed += first.loss != again.loss or first.norm != again.norm
        compare(watch, step, first, again)

    keys = {**sections.pop("train", {}), "steps": steps}
    watching = partial(Watch, say=lines.append)
    with (
        mock.patch.object(Watch, "_compare", compared),
        mock.patch.object(trainer, "Watch", lambda job, state, say: watching(job, state)),
    ):
        train(work, model=SMALL, **sections, train=keys)
    return {"steps": steps, "recomputed": len(lines), "differed": differed, "lines": lines}


def cost(work: Path, *, steps: int) -> dict[str, float]:
    """Return seconds of a step of the quickstart's training, and those of the watch in it."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(owner: Any, name: str, part: str) -> Any:
        work = getattr(owner, name)

        def measured(*arguments: Any, **how: Any) -> Any:
            began = time.process_time()
            try:
                return work(*arguments, **how)
            finally:
                seconds[part] += time.process_time() - began

        return mock.patch.object(owner, name, measured)

    with ExitStack() as stack:
        for owner, name, part in (
            (trainer, "run_step", "step"),
            (Watch, "_figures", "watch"),
            (Watch, "_standing_out", "watch"),
            (corruption, "sums_of_bits", "watch"),
            (ShardedState, "_note_added", "watch"),
        ):
            stack.enter_context(timed(owner, name, part))
        sequence = {"length": 16384, "num_subsequences": 8}
        train(
            work,
            model={"preset": "tiny"},
            data={"tokens": "stream"},
            sequence=sequence,
            train={"steps": steps},
        )
    return {
        "steps": steps,
        "step_cpu_s": seconds["step"] / steps,
        "watch_cpu_s": seconds["watch"] / steps,
        "share": seconds["watch"] / seconds["step"],
    }


def _print(report: Mapping[str, Any]) -> None:
    found, spent = report["flips"], report["cost"]
    rows = [
        ("flipped bits in gradients, effect > 1e-3", found["with_effect"], found["found"]),
        ("flipped bits in weights", found["weights_flipped"], found["weights_found"]),
    ]
    harness.print_table(("", "flips", "found"), rows)
    harness.print_table(
        ("ordinary steps", "steps", "computed again", "differed"),
        [
            (name, run["steps"], *(run[count] for count in COUNTED))
            for name, run in report["ordinary"].items()
        ],
    )
    print(f"missed: {found['missed_by_tensor']}; cost: {spent['share']:.2%} of a step")


if __name__ == "__main__":
    main()
