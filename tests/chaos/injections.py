"""Injections: one fault in a run of a few steps, drawn by a seed, and the verdict on its end.

A run that a fault has ended goes on by itself or, where it may not, by the same command. In the end
all of its steps have the losses and gradient norms, and its last checkpoint the tensors, of a run
without a fault, bit for bit. Meanwhile no process is left over, nothing stays on the disk of the
tier, no end takes longer than the timeouts say, and each failure has one report that names the
rank.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tests.chaos import places
from tests.chaos.faults import FAULTS, FILLER_FILE, GRACE_S, STRUCK_FILE, TERMINATE_S, Fault
from tests.chaos.layouts import LAYOUTS, ON_DISK, STEPS, write_layout
from tests.chaos.places import Place
from tests.training.forked_sppo import Ended, ForkedSppo
from tests.training.jobs import losses, records

_BUSY_S = 20.0
"""Seconds that a busy machine may add to the end of a run."""
_CHECKPOINT_FACTOR = 10
"""Factor on the time that ranks wait for each other while they read or write checkpoints."""
_RANDOM_WORDS: Mapping[str, Sequence[object]] = {
    "checkpoint.async_save": (False, False, True),
    "train.restarts": (0, 2),
    "planning.ahead": (False, False, True),
}
"""Values of keys that each injection draws."""
_LEFT_OVER = re.compile(r"\.(partial|deleting)")
_OF_LAUNCHER = re.compile(r"error: (after .*, )?rank \d")
"""Report of the launcher, which may follow what rank 0 says of its own end."""


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault at a place of a run."""

    seed: int
    layout: str
    kind: str
    place: Place
    restarts: int
    words: tuple[str, ...]
    """Arguments of the run."""

    def __str__(self) -> str:
        restarts = f", {self.restarts} restarts" if self.restarts else ""
        return f"seed {self.seed}: {self.layout}, {self.kind} {self.place}{restarts}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on an injection."""

    struck: bool
    """False if the run did not come to the place, as threads of copies make no equal calls."""
    problem: str
    """What is wrong with the end of the run; "" if nothing is."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A run without a fault."""

    losses: Sequence[tuple[float, float]]
    tensors: Mapping[str, object]
    """Checksums of the files with tensors of the last checkpoint, by name."""
    calls: Mapping[int, Mapping[str, Sequence[int]]]
    """Lines that the calls of each place execute, by rank and function."""


class Injector:
    """Runs injections in forked processes, on their small disk.

    Args:
        directory: Directory for the inputs of the runs, and for the runs without a small disk.
        sppo: Command to run.
    """

    def __init__(self, directory: Path, sppo: ForkedSppo) -> None:
        self._directory, self._sppo = directory, sppo
        self.reference = cache(self._reference)

    def draw(self, seed: int) -> Injection:
        """Return the injection of a seed; layouts and kinds take turns."""
        dice = random.Random(seed)
        layout = [*LAYOUTS][seed % len(LAYOUTS)]
        kind = [*FAULTS][seed // len(LAYOUTS) % len(FAULTS)]
        fault, rank = FAULTS[kind], dice.randrange(2)
        functions = self._functions(layout, rank, fault)
        if not functions:
            layout = ON_DISK
            functions = self._functions(layout, rank, fault)
        function = dice.choice(dice.choice(functions))
        of_calls = self.reference(layout).calls[rank][function]
        call = dice.randrange(len(of_calls))
        moments = [moment for moment in fault.moments if moment != "inside" or of_calls[call]]
        moment = dice.choice(moments)
        line = dice.randint(1, of_calls[call]) if moment == "inside" else 0
        drawn = {name: dice.choice(values) for name, values in _RANDOM_WORDS.items()}
        words = {"parallel.timeout_s": fault.timeout_s, **drawn}
        return Injection(
            seed,
            layout,
            kind,
            Place(rank, function, call + 1, moment, line),
            drawn["train.restarts"],
            (*(f"{name}={value}" for name, value in words.items()), *fault.words),
        )

    def verdict(self, injection: Injection) -> Verdict:
        """Run an injection; judge its end, and that of the same command after it if it failed."""
        directory = self._made(injection.layout)
        arguments = {
            "directory": str(directory),
            "kind": injection.kind,
            "place": asdict(injection.place),
            "seed": injection.seed,
        }
        hook = "tests.chaos.faults", "inject", arguments
        words = ("train", "run.yaml", *injection.words)
        try:
            ended = self._sppo(*words, cwd=directory, hook=hook, shuts_down=True)
            problem = _problem_of_end(injection, ended, directory)
            if not problem and ended.returncode:
                (directory / FILLER_FILE).unlink(missing_ok=True)
                again = self._sppo(*words, cwd=directory)
                if again.returncode:
                    problem = f"again it ends with {again.returncode}: {again.stderr[-2000:]}"
            problem = problem or self._difference(injection.layout, directory)
            return Verdict((directory / STRUCK_FILE).exists(), problem)
        finally:
            shutil.rmtree(directory)

    def _functions(self, layout: str, rank: int, fault: Fault) -> list[list[str]]:
        """Return the functions that a rank calls and a fault may strike, by kind of place."""
        calls = self.reference(layout).calls[rank]
        found = [
            [n for n in names if n in calls and (fault.functions is None or n in fault.functions)]
            for names in places.KINDS.values()
        ]
        return [names for names in found if names]

    def _made(self, layout: str) -> Path:
        """Return a new directory with the inputs of a layout."""
        inputs = self._directory / layout
        if not inputs.exists():
            inputs.mkdir()
            write_layout(layout, inputs)
        directory = Path(tempfile.mkdtemp(dir=self._sppo.disk or self._directory))
        return shutil.copytree(inputs, directory, dirs_exist_ok=True)

    def _reference(self, layout: str) -> Reference:
        directory = self._made(layout)
        hook = "tests.chaos.faults", "count", {"directory": str(directory)}
        ended = self._sppo("train", "run.yaml", cwd=directory, hook=hook)
        assert ended.returncode == 0, ended.stderr
        files = [directory / f"calls_{rank}.json" for rank in range(2)]
        calls = {rank: json.loads(file.read_text()) for rank, file in enumerate(files)}
        output = directory / "out"
        found = Reference(losses(output), _tensors(output), calls)
        shutil.rmtree(directory)
        return found

    def _difference(self, layout: str, directory: Path) -> str:
        """Return what a run that is done has other than the run without a fault; "" if nothing."""
        wanted, output = self.reference(layout), directory / "out"
        steps = [record["step"] for record in records(output)]
        if steps != list(range(1, STEPS + 1)):
            return f"not each step once: {steps}"
        if losses(output) != wanted.losses:
            return f"other losses: {losses(output)}, not {wanted.losses}"
        if _tensors(output) != wanted.tensors:
            return "other tensors in the last checkpoint"
        partial = [path.name for path in output.rglob("*") if _LEFT_OVER.search(path.name)]
        return f"files left over: {partial}" if partial else _on_disk(directory)


# Verdict on the end of a run with a fault


def _problem_of_end(injection: Injection, ended: Ended, directory: Path) -> str:
    """Return what is wrong with the end of a run in which a fault may have struck."""
    struck = directory / STRUCK_FILE
    codes = _codes(injection) if struck.exists() else {0}
    if ended.left_over:
        return f"processes left over: {ended.left_over}"
    if ended.returncode not in codes:
        return f"exit code {ended.returncode}, not {codes}: {ended.stderr[-3000:]}"
    problem = _on_disk(directory)
    if problem or not struck.exists():
        return problem
    took_s, limit_s = ended.ended_s - float(struck.read_text()), _longest_s(injection)
    if took_s > limit_s:
        return f"it ended {took_s:.1f} s after the fault, later than {limit_s:.1f} s"
    return _problem_of_report(injection, ended) or _problem_of_failures(injection, directory)


def _codes(injection: Injection) -> set[int]:
    """Return the exit codes of a run that a fault has struck.

    Any run may succeed: the fault may come too late, or where errors are passed over.
    """
    fault = FAULTS[injection.kind]
    goes_on = injection.restarts > 0 and fault.code == 1
    return {0} if goes_on else {0, fault.code}


def _problem_of_report(injection: Injection, ended: Ended) -> str:
    """Return what is wrong with what a failed run printed."""
    fault, said = FAULTS[injection.kind], ended.stderr
    if ended.returncode == 0 and "error: " not in said:
        return ""
    if ended.returncode == -9:
        return f"a killed launcher spoke: {said}" if "error: " in said else ""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    of_launcher = [line for line in errors if _OF_LAUNCHER.match(line)]
    silent = not errors and fault.end != "asked"  # a run that saves before it ends is no error
    if silent or len(of_launcher) > 1 or len(errors) - len(of_launcher) > 1:
        return f"{len(errors)} reports: {said[-3000:]}"
    if "Traceback" in said and not fault.is_bug:
        return f"a traceback: {said[-3000:]}"
    rank = injection.place.rank
    named = not fault.names_rank or f"rank {rank}" in (said if fault.is_bug else errors[-1])
    return "" if named else f"rank {rank} is not named: {said[-3000:]}"


def _problem_of_failures(injection: Injection, directory: Path) -> str:
    """Return what is wrong with the file of a run's failures, if there is one."""
    file, fault = directory / "out/failures.jsonl", FAULTS[injection.kind]
    failures = [*map(json.loads, file.read_text().splitlines())] if file.exists() else []
    if len(failures) > 1:
        return f"{len(failures)} failures are recorded"
    ranks = [failure["rank"] for failure in failures]
    wrong = fault.names_rank and not fault.is_bug and ranks not in ([], [injection.place.rank])
    return f"the failure of another rank is recorded: {ranks}" if wrong else ""


def _longest_s(injection: Injection) -> float:
    """Return the longest time in seconds from a fault to the end of the run."""
    fault = FAULTS[injection.kind]
    waits_s = (_CHECKPOINT_FACTOR + 1) * fault.timeout_s * (fault.end == "hangs")
    return (1 + injection.restarts) * (waits_s + GRACE_S + TERMINATE_S + _BUSY_S)


def _on_disk(directory: Path) -> str:
    files = sorted(path.name for path in (directory / "spill").iterdir())
    return f"left on the disk of the tier: {files}" if files else ""


def _tensors(output: Path) -> dict[str, object]:
    """Return the checksums of the files with tensors of the newest checkpoint."""
    newest = max((output / "checkpoints").glob("step_??????"))
    files = json.loads((newest / "manifest.json").read_text())["files"]
    return {name: entry for name, entry in files.items() if name.endswith(".distcp")}
