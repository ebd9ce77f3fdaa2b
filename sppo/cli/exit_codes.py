"""Exit codes of all commands, and errors as one message on stderr instead of a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from sppo.parallel.job.environment import is_started_rank
from sppo.parallel.job.exit_codes import BAD_INPUT, CORRUPTED, FAULT, NO_PLAN, NO_ROOM
from sppo.parallel.job.peer_errors import PeerLostError
from sppo.planning.nothing_fits import NothingFitsError
from sppo.quoting import readable
from sppo.report.lines import for_stderr
from sppo.training.interruption import CorruptionError, NonFiniteError

MEANINGS = {
    0: "done",
    FAULT: "anything else: a lost rank, a disk that fails, a bug",
    BAD_INPUT: "bad configuration or input",
    NO_PLAN: "no feasible plan",
    NO_ROOM: "out of memory, disk, open files or processes",
    CORRUPTED: "a device computed or kept wrong values",
    130: "stopped by SIGINT (Ctrl-C) with steps left",
    143: "stopped by SIGTERM with steps left",
}
"""Exit codes of all commands and their meanings."""

_ERRORS = {
    NO_ROOM: "ENOSPC EDQUOT ENOMEM EMFILE ENFILE EAGAIN",
    BAD_INPUT: "EACCES EPERM EROFS ENOENT ENOTDIR EISDIR EEXIST EBADF EBUSY ELOOP ENAMETOOLONG",
    FAULT: "EIO EFBIG ESTALE ETIMEDOUT ENODEV ECHILD",
}
"""Names of system errors by exit code: exhausted memory, disk space, open files or processes; a bad
path; a disk that fails during a run."""
_CODES = {getattr(errno, name): code for code, names in _ERRORS.items() for name in names.split()}
_LIMITS = ("Too many open files", "Resource temporarily unavailable", "can't start new thread")
"""Messages of torch and Python for exhausted limits, in errors without an error number."""
_NO_MEMORY = (
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to map segment",
    "std::bad_alloc",
)
"""Messages of the memory pool in ``csrc``, of torch's own CPU allocator, and of the loading of a
library when ``ulimit -v`` leaves no address space."""


@contextmanager
def exit_codes() -> Iterator[None]:
    """End the command with a message and an exit code on errors that a user can fix.

    Other errors, which are bugs, pass through.
    """
    try:
        yield
    except ValueError as error:
        fail(_with_notes(str(error), error), code=BAD_INPUT)
    except NothingFitsError as error:
        fail(str(error), code=NO_PLAN)
    except MemoryError as error:
        fail(str(error) or "out of memory", code=NO_ROOM)
    except OSError as error:
        if error.errno not in _CODES:
            raise
        fail(_disk_fault(error), code=_CODES[error.errno])
    except (PeerLostError, CorruptionError) as error:
        code = CORRUPTED if isinstance(error, CorruptionError) else FAULT
        if is_started_rank(os.environ):  # the launcher names the cause, and then this rank
            raise typer.Exit(code) from None
        fail(_with_notes(str(error), error), code=code)
    except NonFiniteError as error:
        fail(str(error), code=FAULT)
    except (RuntimeError, ImportError) as error:
        limit = _exhausted_limit(error)
        if limit is None:
            raise
        fail(limit, code=NO_ROOM)


@contextmanager
def standard_output() -> Iterator[None]:
    """Handle errors of writing to standard output as errors of files: named, with an exit code.

    Commands print their results after their work, outside of :func:`exit_codes`.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or "standard output"
        try:
            with exit_codes():
                raise OSError(error.errno, error.strerror, where) from error
        except typer.Exit as ended:
            sys.exit(ended.exit_code)


def fail(message: str, *, code: int) -> NoReturn:
    """Print `message` on stderr and end the command with exit code `code`."""
    typer.echo(for_stderr(f"error: {readable(message)}"), err=True)
    raise typer.Exit(code) from None


def _disk_fault(error: OSError) -> str:
    """Return the file name, the system's message and the notes of an error in one line."""
    where = f"{error.filename}: " if error.filename else ""
    return _with_notes(f"{where}{error.strerror or error}", error, between="; ")


def _with_notes(text: str, error: BaseException, *, between: str = "\n") -> str:
    return between.join([text, *getattr(error, "__notes__", [])])


def _exhausted_limit(error: RuntimeError | ImportError) -> str | None:
    """Return a message if `error` reports a failed allocation or an exhausted limit, else None.

    Torch raises a RuntimeError on the CPU and OutOfMemoryError, a subclass, on CUDA.
    """
    text = str(error)
    for phrase in _LIMITS:
        if phrase in text:
            return f"{phrase}: raise that limit (ulimit -n, ulimit -u)"
    if type(error).__name__ == "OutOfMemoryError" or any(said in text for said in _NO_MEMORY):
        return f"out of memory: {error}"
    return None
