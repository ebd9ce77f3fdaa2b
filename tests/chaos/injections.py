"""Injections: one fault in a run of a few steps, drawn by a seed, and the verdict on its end.

A run that a fault has ended is started again by the same command. In the end all of its steps have
the losses and gradient norms, and its last checkpoint the tensors, of a run without a fault, bit
for bit. Meanwhile no process is left over, nothing stays on the disk of the tier, no end takes
longer than the timeouts say, and each failure has one report that names the rank.

Many injections, with one line on each and counts at the end::

    python -m tests.chaos.injections --seed 1000 --count 300
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tests.chaos import places
from tests.chaos.faults import FAULTS, GRACE_S, STRUCK_FILE, TERMINATE_S
from tests.chaos.places import Place
from tests.conftest import write_run, write_tokens
from tests.training.forked_sppo import Ended, ForkedSppo
from tests.training.jobs import losses, records

TIMEOUT_S = 5
"""``parallel.timeout_s`` of runs in which a rank waits in vain."""
_PATIENT_S = 60
"""Of all others: on a busy machine ranks are slow."""
_STEPS = 4
_BUSY_S = 20.0
"""Seconds that a busy machine may add to the end of a run."""
_RUN: Mapping[str, Mapping[str, object]] = {
    "model": {"num_layers": 2},
    "sequence": {"length": 32, "num_subsequences": 2},
    "train": {"steps": _STEPS},
    "checkpoint": {"every": 2, "keep": 2},
}
_LEFT_OVER = re.compile(r"\.(partial|deleting)")
_OF_LAUNCHER = re.compile(r"error: (after .*, )?rank \d")
"""Report of the launcher, which may follow what rank 0 says of its own end."""
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "pipeline": {"parallel": {"pipeline_parallel_degree": 2}},
    "ulysses": {"parallel": {"sequence_parallel_degree": 2}},
    "zero 3": {
        "parallel": {"data_parallel_degree": 2, "zero": 3},
        "train": {"sequences_per_step": 2},
    },
    "looped on disk": {
        "model": {"num_layers": 4},
        "parallel": {"pipeline_parallel_degree": 2, "virtual_stages": 2},
        "activations": {"policy": "offload_all", "kv": "offload", "disk": "spill"},
        "state": {"optimizer": "disk", "gradients": "disk"},
    },
    "samples": {
        "parallel": {"data_parallel_degree": 2},
        "data": {"samples": "documents", "tokens": "documents"},
        "planning": {"ahead": False},
        "train": {"samples_per_step": 4},
    },
}
"""Sections of the run file that differ from :data:`_RUN`, by layout; each has two ranks."""


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault at a place of a run."""

    seed: int
    layout: str
    kind: str
    place: Place
    words: tuple[str, ...]
    """Arguments of the run."""

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.layout}, {self.kind} {self.place}"


@dataclass(frozen=True, slots=True)
class Reference:
    """A run without a fault."""

    losses: Sequence[tuple[float, float]]
    tensors: Mapping[str, str]
    """Checksums of the files with tensors of the last checkpoint, by name."""
    calls: Mapping[int, Mapping[str, Sequence[int]]]
    """Lines that the calls of each place execute, by rank and function."""
    seconds: float


class Injector:
    """Runs injections, below a directory, in forked processes."""

    def __init__(self, directory: Path, sppo: ForkedSppo) -> None:
        self._directory, self._sppo = directory, sppo
        self.reference = cache(self._reference)

    def draw(self, seed: int) -> Injection:
        """Return the injection of a seed; layouts and kinds take turns."""
        dice = random.Random(seed)
        layout = [*LAYOUTS][seed % len(LAYOUTS)]
        kind = [*FAULTS][seed // len(LAYOUTS) % len(FAULTS)]
        rank = dice.randrange(2)
        calls = self.reference(layout).calls[rank]
        of_kinds = [[name for name in names if calls.get(name)] for names in places.KINDS.values()]
        function = dice.choice(dice.choice([names for names in of_kinds if names]))
        call = dice.randrange(len(calls[function]))
        lines = calls[function][call]
        moment = dice.choice(("before", "inside", "after") if lines else ("before", "after"))
        line = dice.randint(1, lines) if moment == "inside" else 0
        timeout_s = TIMEOUT_S if FAULTS[kind].end == "hangs" else _PATIENT_S
        words = [f"parallel.timeout_s={timeout_s}"]
        if dice.random() < 0.3:
            words.append("checkpoint.async_save=true")
        place = Place(rank, function, call + 1, moment, line)
        return Injection(seed, layout, kind, place, tuple(words))

    def verdict(self, injection: Injection) -> str:
        """Run an injection and return what is wrong with its end; "" if nothing is."""
        fault, timeout_s = FAULTS[injection.kind], TIMEOUT_S
        if fault.end != "hangs":
            timeout_s = _PATIENT_S
        directory = self._made(injection.layout)
        try:
            hook = {
                "directory": str(directory),
                "kind": injection.kind,
                "place": asdict(injection.place),
                "timeout_s": timeout_s,
            }
            words = ("train", "run.yaml", *injection.words)
            ended = self._sppo(
                *words, cwd=directory, hook=("tests.chaos.faults", "inject", hook), shuts_down=True
            )
            problem = _problem_of_end(injection, ended, directory)
            if not problem and ended.returncode:
                again = self._sppo(*words, cwd=directory)
                if again.returncode:
                    return f"the same command ends with {again.returncode}: {again.stderr[-1500:]}"
            return problem or self._difference(injection.layout, directory)
        finally:
            shutil.rmtree(directory)

    def _made(self, layout: str) -> Path:
        """Return a new directory with the run of a layout and its inputs."""
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        of_layout = LAYOUTS[layout]
        sections = {
            name: {**_RUN.get(name, {}), **of_layout.get(name, {})}
            for name in {**_RUN, **of_layout}
        }
        write_run(directory / "run.yaml", **sections)
        write_tokens(directory / "tokens")
        write_tokens(directory / "documents", documents=range(20, 1200, 23))
        (directory / "spill").mkdir()
        return directory

    def _reference(self, layout: str) -> Reference:
        directory, began_s = self._made(layout), time.monotonic()
        hook = ("tests.chaos.faults", "count", {"directory": str(directory)})
        ended = self._sppo("train", "run.yaml", cwd=directory, hook=hook)
        assert ended.returncode == 0, ended.stderr
        calls = {
            rank: json.loads((directory / f"calls_{rank}.json").read_text()) for rank in range(2)
        }
        output = directory / "out"
        found = Reference(losses(output), _tensors(output), calls, time.monotonic() - began_s)
        shutil.rmtree(directory)
        return found

    def _difference(self, layout: str, directory: Path) -> str:
        """Return what a run that is done has other than the run without a fault; "" if nothing."""
        wanted, output = self.reference(layout), directory / "out"
        steps = [record["step"] for record in records(output)]
        if steps != list(range(1, _STEPS + 1)):
            return f"not each step once: {steps}"
        if losses(output) != wanted.losses:
            return f"other losses: {losses(output)}, not {wanted.losses}"
        if _tensors(output) != wanted.tensors:
            return "other tensors in the last checkpoint"
        partial = [path.name for path in output.rglob("*") if _LEFT_OVER.search(path.name)]
        return f"files left over: {partial}" if partial else _on_disk(directory)


def _problem_of_end(injection: Injection, ended: Ended, directory: Path) -> str:
    """Return what is wrong with the end of a run in which a fault may have struck."""
    fault, said = FAULTS[injection.kind], ended.stderr
    struck = directory / STRUCK_FILE
    codes = (0, *fault.codes) if struck.exists() and fault.end != "well" else (0,)
    if ended.left_over:
        return f"processes left over: {ended.left_over}"
    if ended.returncode not in codes:
        return f"exit code {ended.returncode}, not {codes}: {said[-2000:]}"
    if problem := _on_disk(directory):
        return problem
    if not struck.exists():
        return ""
    took_s = ended.ended_s - float(struck.read_text())
    if took_s > (limit_s := _longest_s(injection)):
        return f"it ended {took_s:.1f} s after the fault, later than {limit_s:.1f} s"
    if ended.returncode in (0, -9):
        return ""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    of_launcher = [line for line in errors if _OF_LAUNCHER.match(line)]
    if not errors or len(of_launcher) > 1 or len(errors) - len(of_launcher) > 1:
        return f"{len(errors)} reports: {said[-2000:]}"
    if "Traceback" in said and "exception" not in injection.kind:
        return f"a traceback: {said[-2000:]}"
    if fault.end in ("fails", "hangs") and f"rank {injection.place.rank}" not in said:
        return f"rank {injection.place.rank} is not named: {said[-2000:]}"
    return ""


def _longest_s(injection: Injection) -> float:
    """Return the longest time in seconds from a fault to the end of the run."""
    if FAULTS[injection.kind].end == "hangs":
        waits_s = 10 * TIMEOUT_S + TIMEOUT_S  # ranks wait for checkpoints ten times as long
        return waits_s + GRACE_S + TERMINATE_S + _BUSY_S
    return GRACE_S + TERMINATE_S + _BUSY_S


def _on_disk(directory: Path) -> str:
    files = sorted(path.name for path in (directory / "spill").iterdir())
    return f"left on the disk of the tier: {files}" if files else ""


def _tensors(output: Path) -> dict[str, str]:
    """Return the checksums of the files with tensors of the newest checkpoint."""
    newest = max((output / "checkpoints").glob("step_??????"))
    files = json.loads((newest / "manifest.json").read_text())["files"]
    return {name: entry for name, entry in files.items() if name.endswith(".distcp")}


def main() -> None:
    """Run injections one after another; print a line on each, and counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=len(LAYOUTS) * len(FAULTS))
    chosen = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    sppo = ForkedSppo()
    with tempfile.TemporaryDirectory() as directory:
        injector = Injector(Path(directory), sppo)
        for seed in range(chosen.seed, chosen.seed + chosen.count):
            injection, began_s = injector.draw(seed), time.monotonic()
            problem = injector.verdict(injection)
            took_s = time.monotonic() - began_s
            counts[injection.layout, "wrong" if problem else "well"] += 1
            counts[injection.kind, "wrong" if problem else "well"] += 1
            print(f"{'WRONG' if problem else 'well'} {took_s:.1f} s, {injection}", flush=True)
            if problem:
                print("  " + problem.replace("\n", "\n  "), flush=True)
    sppo.close()
    for (name, verdict), number in sorted(counts.items()):
        print(f"{name}: {number} {verdict}")


if __name__ == "__main__":
    main()
