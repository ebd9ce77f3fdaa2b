"""Run a command that writes files on a full disk, at some levels of remaining space.

For each level, a small disk in memory holds the older outputs and the remaining space. Checks: the
exit code is 0 or 4 without a traceback; an error names a file or its directory; every output is the
older one, complete, or absent; no partial file is left; and the same command succeeds once there is
space. Needs ``unshare`` and the right to mount inside of it. Prints the exit code of each level::

    unshare -rm python -m tests.chaos.full_disk simulate-png 0 4 64
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
DISK_BYTES = 24 << 20
OLD = b"the older file\n"
RUN: dict[str, dict[str, object]] = {
    "model": {"preset": "tiny-test", "vocab_size": 257, "num_layers": 2},
    "data": {"tokens": "../tokens", "shuffle": False},
    "sequence": {"length": 64, "num_subsequences": 2, "alignment": 8},
    "train": {"steps": 4, "dtype": "fp32", "output": "out"},
    "checkpoint": {"every": 2, "keep": 1},
}
_SHAPE = "schedule=sppo ranks=2 sequences=1 subsequences=4"


@dataclass(frozen=True, slots=True)
class Case:
    """Command, and the files that it writes.

    Attributes:
        words: Arguments of ``sppo``. Run files are beside the disk, which is the working directory.
        files: Files that the command replaces; an older one of each exists.
        run: Output directory of a run that has trained some steps when the disk fills up; None if
            the command is no training.
        disks: Names of the disk in errors, if it is also a tier for activations.
    """

    words: str
    files: tuple[str, ...] = ()
    run: str | None = None
    disks: tuple[str, ...] = ()


CASES = {
    "simulate-png": Case(f"simulate {_SHAPE} --png a.png", ("a.png",)),
    "simulate-trace": Case(f"simulate {_SHAPE} --trace a.json", ("a.json",)),
    "simulate-program": Case(f"simulate {_SHAPE} --write-program a.txt", ("a.txt",)),
    "simulate-all": Case(
        f"simulate {_SHAPE} --png a.png --trace a.json --write-program a.txt",
        ("a.png", "a.json", "a.txt"),
    ),
    "solve": Case("solve ../solve.json -o plan.json", ("plan.json",)),
    "eval": Case("eval ../trained.json --sequences 1 --png a.png", ("a.png",)),
    "to-hf": Case("convert to-hf ../trained hf"),
    "from-hf": Case("convert from-hf ../hf hf"),
    "prepare": Case("data prepare --tokenizer bytes --out new/tokens ../text.txt"),
    "train": Case("train ../run.json", run="out"),
    "train-async": Case("train ../run.json checkpoint.async_save=true", run="out"),
    "train-board": Case("train ../run.json train.tensorboard=true", run="out"),
    "train-resumed": Case("train ../run.json train.steps=8", run="out"),
    "train-kv": Case(
        "train ../run.json parallel.virtual_stages=2 activations.kv=offload activations.disk=.",
        run="out",
        disks=("activations.disk=.", "a file tier of"),
    ),
    "train-ranks": Case("train ../run.json parallel.pipeline_parallel_degree=2", run="out"),
}


def main() -> None:
    """Run a case at levels, given as free pages; exit code 1 if anything is wrong."""
    name, *levels = sys.argv[1:]
    case, failures = CASES[name], []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        if "../" in case.words:
            _prepare(work)
        for level in map(int, levels):
            with _small_disk(work) as disk:
                outcome, problems = _play(case, disk, free_bytes=level * PAGE_BYTES)
            print(f"{level} pages left: {outcome}")
            failures += [f"{name}, {level} pages left: {problem}" for problem in problems]
    raise SystemExit("\n".join(failures) or 0)


def _prepare(work: Path) -> None:
    """Make the inputs of all cases: text, tokens, run files, a trained run, and its HF form."""
    (work / "text.txt").write_text("What goes in must come out. " * 4000)
    here = work / "here"
    here.mkdir()
    (work / "run.json").write_text(json.dumps(RUN))
    train = {**RUN["train"], "output": "../trained"}
    (work / "trained.json").write_text(json.dumps({**RUN, "train": train}))
    hardware = {"preset": "h100", "nodes": 1, "devices_per_node": 2}
    (work / "solve.json").write_text(json.dumps({**RUN, "hardware": hardware}))
    for words in (
        "data prepare --tokenizer bytes --out ../tokens ../text.txt",
        "train ../trained.json",
        "convert to-hf ../trained ../hf",
    ):
        code, said = _sppo(words, here)
        if code != 0:
            raise SystemExit(f"sppo {words}: exit code {code}\n{said}")


class _small_disk:  # noqa: N801 - used like a function
    """File system in memory, mounted while the context is active."""

    def __init__(self, work: Path) -> None:
        self._place = work / "disk"

    def __enter__(self) -> Path:
        self._place.mkdir(exist_ok=True)
        if os.system(f"mount -t tmpfs -o size={DISK_BYTES} none {self._place}") != 0:
            raise SystemExit("this machine lets nobody mount a small disk")
        return self._place

    def __exit__(self, *_: object) -> None:
        os.system(f"umount -l {self._place}")


def _play(case: Case, disk: Path, *, free_bytes: int) -> tuple[str, list[str]]:
    """Run a case; return its outcome and its problems."""
    problems: list[str] = []
    if case.run is not None and "steps=8" in case.words:
        code, said = _sppo("train ../run.json", disk)
        problems += [] if code == 0 else [f"before: {said}"]
    for name in case.files:
        (disk / name).write_bytes(OLD)
    _fill(disk, free_bytes=free_bytes)
    code, said = _sppo(case.words, disk)
    if code not in (0, 4) or "Traceback" in said or "Exception" in said:
        problems.append(f"exit code {code}: {said}")
    if code == 4:
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        named = (*case.files, case.run or "new/tokens", "hf", "new/tokens", *case.disks)
        if not any(name in line for line in errors for name in named):
            problems.append(f"the file is not named: {said}")
    problems += list(_torn(case, disk))
    if code == 0 and case.run and "cannot be written" in said:
        outcome = "0, warned"
    else:
        outcome = str(code)
    (disk / "filler").unlink()
    again, said = _sppo(case.words, disk) if code else (0, "")
    if again != 0:
        problems.append(f"with room again, exit code {again}: {said}")
    problems += list(_torn(case, disk, complete=True))
    return outcome, problems


def _fill(disk: Path, *, free_bytes: int) -> None:
    """Fill `disk` until `free_bytes` bytes are free."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(PAGE_BYTES))
        except OSError:
            filler.truncate(max(0, filler.tell() - free_bytes))


def _torn(case: Case, disk: Path, *, complete: bool = False) -> Iterator[str]:
    """Yield outputs that are neither the older file nor complete, and partial files."""
    for path in disk.rglob("*"):
        if ".partial" in path.name:
            yield f"{path.relative_to(disk)} was left"
        whole = _WHOLE.get(path.suffix)
        if whole is not None and path.read_bytes() != OLD and not whole(path):
            yield f"{path.relative_to(disk)} is torn"
    for name in case.files:
        if not (disk / name).exists() or (complete and (disk / name).read_bytes() == OLD):
            yield f"{name} is gone, or the older one after a success"


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def _are_lines(path: Path) -> bool:
    text = path.read_text()
    return not text or (text.endswith("\n") and all(map(json.loads, text.splitlines())))


_WHOLE: dict[str, Callable[[Path], bool]] = {
    ".png": lambda path: path.read_bytes().endswith(b"IEND\xaeB`\x82"),
    ".json": _is_json,
    ".jsonl": _are_lines,
}


def _sppo(words: str, directory: Path) -> tuple[int, str]:
    """Run a command in a fork, which saves the imports; return exit code, stderr and warnings."""
    out, err = directory.parent / "stdout", directory.parent / "stderr"
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.chdir(directory)
            for path, number in ((out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            code = _run(words)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    warnings = [line for line in out.read_text().splitlines() if line.startswith("warning")]
    return os.waitstatus_to_exitcode(status), err.read_text() + "\n".join(warnings)


def _run(words: str) -> int:
    import traceback

    from sppo.__main__ import main

    sys.argv = ["sppo", *words.split()]
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 98
    return 0


if __name__ == "__main__":
    import matplotlib.figure  # noqa: F401 - loaded once, for all children

    import sppo.cli.app
    import sppo.engine.engine
    import sppo.training.preflight  # noqa: F401

    main()
