"""Harness of the comparisons: arguments, commands, processes that take turns, report and table.

The sides of a comparison run in turns on the same machine, so that noise of the machine affects all
of them. A side is one process, or one for each rank of a pipeline, so that its peak memory can be
measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "scripts"))  # its files import each other

from option_types import one_of, output_file, positive, several

from sppo.config import load_run
from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.hardware.run_hardware import run_hardware
from sppo.hardware.this_machine import cpu_model
from sppo.output_file import write_text

__all__ = ["one_of", "output_file", "positive", "several"]

ROOT = Path(__file__).parents[1]
TIMEOUT = timedelta(hours=2)
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 2,
    "mlp_size": 1792,
}
"""Llama-shaped model of the README, which two cores can train."""
_WIDTH = 150
"""Columns of a table, also when it is written to a file."""
_LOAD_BEFORE = os.getloadavg()

Make = Callable[[int, Any], Callable[[], Any]]
"""Function that a process calls once, with its rank and its arguments; returns its step."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option that all comparisons have, ``--output``."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--output", type=output_file, help="write the figures here as JSON")
    return made


def run_arguments(
    description: str | None,
) -> tuple[argparse.Namespace, RunConfig, HardwareSpec]:
    """Return the options of a comparison that plans a run file, the run and its hardware.

    The process ends with code 2 and all problems on stderr if the run file is wrong.
    """
    made = parser(description)
    made.add_argument("run_file", type=Path)
    made.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = made.parse_args()
    try:
        run = load_run(options.run_file, options.overrides)
        return options, run, run_hardware(run)
    except (ValueError, OSError) as error:
        made.error(str(error))


def header(provenance: str = "measured") -> dict[str, Any]:
    """Return how the figures of a report were made: date, machine, load, versions, command."""
    return {
        "provenance": provenance,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores",
        "load_before": _LOAD_BEFORE,
        "torch": version("torch"),
        "command": command(),
    }


def command() -> str:
    """Return the command line of this comparison."""
    module = f"experiments.{Path(sys.argv[0]).stem}"
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def write_report(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report as JSON; nothing if `path` is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(report, indent=1) + "\n")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; all columns but the first are right-aligned."""
    from rich.console import Console

    from sppo.cli.printing import table

    cells = [[str(cell) for cell in row] for row in rows]
    Console(width=_WIDTH).print(table(headings, cells))


def sppo(*words: str | Path, cwd: Path | None = None, codes: Sequence[int] = (0,)) -> str:
    """Run ``sppo`` with `words` and return what it prints.

    Raises:
        RuntimeError: The exit code is none of `codes`.
    """
    line = [sys.executable, "-m", "sppo", *map(str, words)]
    done = subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode not in codes:
        raise RuntimeError(f"sppo {shlex.join(line[3:])}: {done.stderr.strip()[-2000:]}")
    return done.stdout


class Side:
    """Processes of one side of a comparison, one for each rank.

    Several ranks are connected over gloo, in torch's default process group. The program ends with
    an error as soon as one of the processes does.

    Args:
        name: Name of the side, for errors.
        make: Function of a module that sets up a rank and returns its step.
        arguments: Second argument of `make`.
        ranks: Number of ranks.
        threads: Threads of each rank.
    """

    def __init__(
        self, name: str, make: Make, arguments: Any, *, ranks: int = 1, threads: int = 1
    ) -> None:
        os.environ |= {
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
        }
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:  # closed before rank 0 listens there
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._name, self._pipes = name, []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run_rank, args=(make, arguments, rank, ranks, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def step(self) -> list[Any]:
        """Run a step on all ranks, and return what each returned."""
        for pipe in self._pipes:
            pipe.send(None)
        return self._answers()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def _answers(self) -> list[Any]:
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._pipes):
            for pipe in wait([pipe for pipe in self._pipes if pipe not in answers]):
                assert isinstance(pipe, Connection), "only pipes are waited for"
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    sys.exit(f"error: {self._name}: a rank failed; see its error above")
        return [answers[pipe] for pipe in self._pipes]


def _run_rank(
    make: Make, arguments: Any, rank: int, ranks: int, port: int, pipe: Connection
) -> None:
    """Set up a rank, then run a step whenever asked, until the process is ended."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=ranks,
            timeout=TIMEOUT,
        )
    step = make(rank, arguments)
    pipe.send(None)
    while True:
        pipe.recv()
        pipe.send(step())


def take_turns(
    sides: Mapping[str, Side], *, turns: int, label: str = ""
) -> dict[str, list[list[Any]]]:
    """Let each side run a step per turn, then end the sides; print the seconds of each step.

    Returns:
        Answers of the ranks of each side, turn by turn; each has the key "step_s".
    """
    answers: dict[str, list[list[Any]]] = {name: [] for name in sides}
    for turn in range(turns):
        for name, side in sides.items():
            answers[name].append(side.step())
            took_s = max(answer["step_s"] for answer in answers[name][-1])
            print(f"  {label}turn {turn} {name:<28} {took_s:.2f} s", flush=True)
    for side in sides.values():
        side.close()
    return answers


def run_ranks(serve: Callable[[int, Any], Any], arguments: Any, *, ranks: int) -> Any:
    """Call a function of a module once on each rank, and return what it returns on rank 0."""
    side = Side("the pipeline", partial(partial, serve), arguments, ranks=ranks)
    report, *_ = side.step()
    side.close()
    return report


def timed_s(step: Callable[[], object]) -> float:
    """Return the seconds of a step of several ranks, from a barrier to a barrier."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


class Meter:
    """Measures steps of this process: seconds, processor share, and memory above that of now.

    Args:
        counted_bytes: Bytes that the process holds already and that count as memory of a step.
    """

    def __init__(self, *, counted_bytes: int = 0) -> None:
        import torch.distributed as dist

        from sppo.kernels.native.process_memory import resident_bytes

        self._seconds_of = timed_s if dist.is_initialized() else _seconds_of
        self._idle_bytes = resident_bytes() - counted_bytes

    def measure(self, step: Callable[[], object]) -> dict[str, float]:
        """Run a step, and return its figures."""
        from sppo.kernels.native.process_memory import peak_resident_bytes, reset_peak

        reset_peak()
        cpu_begin_s = time.process_time()
        step_s = self._seconds_of(step)
        return {
            "step_s": step_s,
            "cpu_share": (time.process_time() - cpu_begin_s) / step_s,
            "peak_bytes": peak_resident_bytes() - self._idle_bytes,
        }


def _seconds_of(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
