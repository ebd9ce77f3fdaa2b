"""Launcher of a job's ranks on this machine: starts and watches them, and reports failures.

The launcher serves the store where the ranks meet, on a port chosen by the system, so that no other
program can take the port in between. It computes nothing itself.

``docs/decisions/launcher.md`` says why the agent of torch.distributed.elastic cannot replace it.
"""

from __future__ import annotations

import glob
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO

from sppo.parallel.job.environment import child_environment, nccl_dump_prefix
from sppo.parallel.job.failure_report import RankEnd
from sppo.parallel.job.flight_record import mark_stopped, read_progress
from sppo.parallel.job.job_end import JobEnd
from sppo.parallel.job.signals import STOP_SIGNALS, held_back, signal_name

_LOOK_EVERY_S = 0.05
_GRACE_S = 10.0
"""Seconds from the first failure until other ranks are stopped."""
_TERMINATE_S = 5.0
"""Seconds from SIGTERM to SIGKILL."""
_GIVE_UP_S = 30.0
"""Seconds from SIGKILL until the launcher stops waiting for a process that does not end, and until
it gives up to reach its own store."""
_LAST_LINES = 15
_LAST_BYTES = 1 << 14
_SHARED_MEMORY = "/dev/shm"
_WRAPPER = Path(__file__).with_name("end_with_parent.py")


@dataclass(slots=True)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    record: IO[bytes]
    output: IO[bytes] | None
    ended_s: float | None = None
    stopped: bool = False


def run_ranks(
    command: Sequence[str],
    *,
    num_ranks: int,
    environ: Mapping[str, str],
    threads_per_rank: int | None = None,
) -> JobEnd:
    """Run ``command`` as every rank of a job and wait for all ranks; call from the main thread.

    Rank 0 writes to this process's output; the output of other ranks is kept for the report. The
    first SIGTERM or SIGINT is passed on to every rank, the second kills all ranks. When a rank
    fails, the others have some seconds to end by themselves and are then stopped.

    Args:
        command: Path of a program, and its arguments. The program starts with SIGTERM and SIGINT
            blocked, and must unblock them once it handles them.
        num_ranks: Number of ranks to start.
        environ: Environment for the ranks; the variables of each rank are added.
        threads_per_rank: OMP_NUM_THREADS of each rank, unless ``environ`` has it.

    Raises:
        OSError: A process cannot be started, or the port cannot be opened.
    """
    dumps, started_s, now_s = nccl_dump_prefix(environ), time.monotonic(), time.time()
    with ExitStack() as stack:
        port = stack.enter_context(_served_store(num_ranks))
        job = stack.enter_context(_Job())
        for rank in range(num_ranks):
            record = stack.enter_context(_nameless_file())
            environment = child_environment(
                environ,
                rank=rank,
                num_ranks=num_ranks,
                port=port,
                threads=threads_per_rank,
                progress_file=_path_of(record),
                nccl_dumps=dumps,
            )
            output = stack.enter_context(tempfile.TemporaryFile()) if rank else None
            job.start(command, environment, rank=rank, record=record, output=output)
        ends = job.wait()
    written = Path(dumps).parent.glob(f"{glob.escape(Path(dumps).name)}*")
    found = sorted(path for path in written if path.stat().st_mtime >= now_s)
    return JobEnd(ends, started_s, tuple(job.asked), tuple(found))


def _nameless_file() -> IO[bytes]:
    """Open a file without a name for a flight record, in shared memory if possible."""
    in_memory = os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
    return tempfile.TemporaryFile(dir=_SHARED_MEMORY if in_memory else None)


def _path_of(file: IO[bytes]) -> Path:
    """Return the path of an open file in this process and in children that inherit it."""
    return Path(f"/dev/fd/{file.fileno()}")


@contextmanager
def _served_store(num_ranks: int) -> Iterator[int]:
    """Serve torch's store on the loopback interface during the context, and yield its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.socket()
    try:
        listener.bind(("127.0.0.1", 0))
        listener.listen(max(128, num_ranks))
        port = int(listener.getsockname()[1])
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_GIVE_UP_S),
            master_listen_fd=listener.fileno(),
        )
    except BaseException:
        listener.close()
        raise
    listener.detach()  # owned by the store from here on
    try:
        yield port
    finally:
        del store


class _Job:
    """Ranks of a job as children of this process; none outlives the context."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """Names of the signals that this process received."""
        self._children: list[_Child] = []
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> _Job:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(
                number, lambda number, _: self.asked.append(signal_name(number))
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for child in self._running():
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(_GIVE_UP_S)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        rank: int,
        record: IO[bytes],
        output: IO[bytes] | None,
    ) -> None:
        """Start one rank in a process group of its own, out of reach of a terminal's Ctrl-C."""
        wrapped = (sys.executable, "-I", "-S", str(_WRAPPER), str(os.getpid()), *command)
        with held_back(STOP_SIGNALS):
            process = subprocess.Popen(
                wrapped,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(record.fileno(),),
                process_group=0,
            )
        self._children.append(_Child(rank, process, record, output))

    def wait(self) -> tuple[RankEnd, ...]:
        """Wait until every rank has ended or cannot be killed; pass on signals, stop ranks."""
        passed_on, failed_s = 0, None
        while self._look():
            for name in self.asked[passed_on:]:
                if passed_on:
                    self._kill()
                else:
                    for child in self._running():
                        child.process.send_signal(signal.Signals[name])
                passed_on += 1
            failed_s = failed_s or self._first_failure_s()
            if failed_s is not None and not self._stop(time.monotonic() - failed_s):
                break
            time.sleep(_LOOK_EVERY_S)
        return tuple(_end_of(child) for child in self._children)

    def _stop(self, since_s: float) -> bool:
        """Stop the other ranks ``since_s`` after a failure; return False to stop waiting."""
        if since_s > _GRACE_S + _TERMINATE_S + _GIVE_UP_S:
            return False
        if since_s > _GRACE_S + _TERMINATE_S:
            self._kill()
        elif since_s > _GRACE_S:
            for child in self._running():
                if not child.stopped:
                    child.stopped = True
                    mark_stopped(child.record.fileno())
                    child.process.terminate()
        return True

    def _kill(self) -> None:
        """Kill the process group of every rank that still runs."""
        for child in self._running():
            child.stopped = True
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)

    def _look(self) -> bool:
        """Record which ranks have ended, and return whether any still runs."""
        for child in self._children:
            if child.ended_s is None and child.process.poll() is not None:
                child.ended_s = time.monotonic()
        return bool(self._running())

    def _running(self) -> list[_Child]:
        return [child for child in self._children if child.process.returncode is None]

    def _first_failure_s(self) -> float | None:
        failed = [child.ended_s for child in self._children if child.process.returncode]
        return min(filter(None, failed), default=None)


def _end_of(child: _Child) -> RankEnd:
    """Return how a rank ended; a rank that could not be killed counts as killed."""
    code, output, said = child.process.returncode, child.output, ""
    if output is not None:
        output.seek(max(0, output.seek(0, os.SEEK_END) - _LAST_BYTES))
        said = output.read().decode(errors="replace")
    return RankEnd(
        rank=child.rank,
        returncode=-signal.SIGKILL if code is None else code,
        ended_s=time.monotonic() if child.ended_s is None else child.ended_s,
        stopped=child.stopped,
        note=read_progress(_path_of(child.record)),
        last_lines=tuple(said.rstrip().splitlines()[-_LAST_LINES:]),
    )
