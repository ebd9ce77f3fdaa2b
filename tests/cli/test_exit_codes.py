"""Errors as exit codes and one message."""

import errno

import pytest
import typer

from sppo.cli.exit_codes import exit_codes
from sppo.parallel.job.peer_errors import PeerLostError

FULL = OSError(errno.ENOSPC, "No space left on device", "out/metrics.jsonl")
FULL.add_note("the older file is kept")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ValueError("no such key"), 2, "no such key"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.yaml"), 2, "a.yaml: No such file"),
        (MemoryError(), 4, "out of memory"),
        (FULL, 4, "out/metrics.jsonl: No space left on device; the older file is kept"),
        (OSError(errno.EMFILE, "Too many open files"), 4, "Too many open files"),
        (RuntimeError("epoll_create: Too many open files"), 4, "raise that limit (ulimit -n"),
        (RuntimeError("can't start new thread"), 4, "raise that limit (ulimit -n, ulimit -u)"),
        (ImportError("libfoo.so: failed to map segment"), 4, "out of memory: libfoo.so"),
        (OSError(errno.EIO, "Input/output error", "tokens.bin"), 1, "tokens.bin: Input/output"),
        (PeerLostError("rank 1 is gone"), 1, "rank 1 is gone"),
    ],
    ids=repr,
)
def test_an_error_that_a_user_can_mend(error, code, says, capsys):
    with pytest.raises(typer.Exit) as ended, exit_codes():
        raise error
    assert ended.value.exit_code == code
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert says in said
    assert len(said.splitlines()) == 1


def test_a_bug_passes_through():
    with pytest.raises(RuntimeError, match="a bug"), exit_codes():
        raise RuntimeError("a bug")
