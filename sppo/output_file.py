"""Output files that are whole or absent, even if the disk is full or the machine loses power.

A file is written under another name in the same directory, flushed to the disk and then renamed. A
reader sees the old content or the new content, never a mixture, and a failure leaves the old file
unchanged. Devices, pipes and the files that this process prints to are refused.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

PARTIAL = ".partial-"
"""Part of the name of a file being written; a file left with it is from a killed process."""

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk or an exhausted quota."""

_NAME_BYTES = 200
"""Bytes kept of a file name before the suffix is added; common file systems allow 255 in all."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``path`` when the body ends without an exception.

    Args:
        path: File to replace; a link is followed, and an existing file keeps its permissions.

    Raises:
        OSError: A file that cannot be written. The error names ``path``, and a note says whether
            an older file was kept.
    """
    path = Path(path)
    target = Path(os.path.realpath(path))
    partial = _partial_name(target)
    kept = "the older file is kept" if os.path.exists(target) else "nothing was written"
    with named_errors(path, partial=partial, kept=kept):
        try:
            _check_name(path)
            with partial.open("xb") as file:
                _take_permissions(file, target)
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
    sync_directory(target.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``; raise as :func:`whole_file` does."""
    with whole_file(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in UTF-8; raise as :func:`whole_file` does."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON.

    Raises:
        ValueError: A float that JSON cannot represent (NaN or infinity).
        OSError: As in :func:`whole_file`.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_figure(path: Path, figure: Any, *, dpi: float | None = None) -> None:
    """Replace ``path`` by a PNG of a matplotlib figure; raise as :func:`whole_file` does.

    Args:
        path: File to write, whatever its suffix.
        figure: A ``matplotlib.figure.Figure``.
        dpi: Pixels per inch; None for the figure's own.
    """
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi="figure" if dpi is None else dpi)
    write_bytes(path, drawn.getvalue())


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable, which fsync of the files does not do.

    Some network file systems do not support this and raise EINVAL, which is ignored.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def check_output_files(
    files: Mapping[str, Path | None],
    *,
    plots: Sequence[str] = (),
    plans: Sequence[str] = (),
    inputs: Sequence[Path] = (),
) -> None:
    """Check before any work that files can be written; leave all existing files unchanged.

    Args:
        files: Files by the option that names each; None for options that were not given.
        plots: Options whose files are PNG plots and must end in .png.
        plans: Options whose files are plans, which ``sppo simulate`` recognizes by .json.
        inputs: Files that the command reads, which it must not replace.

    Raises:
        ValueError: A file that cannot be written; the message says why.
    """
    named = {os.path.realpath(path): f"{path} is read by this command" for path in inputs}
    for option, path in files.items():
        if path is None:
            continue
        if os.path.isdir(path):
            raise ValueError(f"{option} {path}: is a directory; name a file in it")
        if option in plots and path.suffix.lower() != ".png":
            raise ValueError(f"{option} {path}: a plot is written as PNG; end the name in .png")
        if option in plans and path.suffix != ".json":
            raise ValueError(f"{option} {path}: a plan is written as JSON; end the name in .json")
        target = os.path.realpath(path)
        if target in named:
            raise ValueError(f"{option} {path}: {named[target]}; give another name")
        named[target] = f"{option} is another file of this command"
        _check_place(option, path)


def check_new_directory(path: Path) -> None:
    """Check that a directory can be made at ``path``, parents included; change nothing.

    Raises:
        ValueError: A directory that cannot be made; the message says why.
    """
    nearest = next(p for p in path.absolute().parents if os.path.lexists(p))
    if not nearest.is_dir():
        raise ValueError(f"{path}: {nearest} is not a directory; give another name")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: the directory {nearest} cannot be written to; give another name")


def check_unused_directory(directory: Path) -> None:
    """Check that ``directory`` can be made, or exists and is empty.

    Raises:
        ValueError: A directory that is not empty or not writable, or a path that is no directory.
    """
    if directory.is_symlink() and not directory.exists():
        raise ValueError(f"{directory} is a link to nowhere; name a new directory")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; name a new directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty and is left as it is; name a new directory")
    check_new_directory(directory)


def _check_place(option: str, path: Path) -> None:
    """Check that a file can be written at ``path``, as :func:`whole_file` will do."""
    try:
        _check_name(path)
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}; give another name") from None
    parent = Path(os.path.realpath(path)).parent if os.path.islink(path) else path.parent
    if not os.path.isdir(parent):
        raise ValueError(f"{option} {path}: there is no directory {parent}")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise ValueError(f"{option} {path}: is write-protected; give another name")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {path}: the directory {parent} cannot be written to")


def _check_name(path: Path) -> None:
    """Raise OSError if no file can have this name: too long, a link to itself, a device, stdout."""
    with suppress(FileNotFoundError):
        mode, printed = path.stat().st_mode, map(os.path.realpath, ("/dev/stdout", "/dev/stderr"))
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or os.path.realpath(path) in printed:
            raise OSError(errno.EPERM, "a device, a pipe, or what this command prints", str(path))


def _partial_name(target: Path) -> Path:
    """Return a unique name for each write, so that two processes never write the same file."""
    start = os.fsdecode(os.fsencode(target.name)[:_NAME_BYTES])
    return target.with_name(f"{start}{PARTIAL}{uuid.uuid4().hex[:12]}")


def _take_permissions(file: BinaryIO, target: Path) -> None:
    """Give ``file`` the permissions of the file that it will replace, if that exists."""
    if not target.exists():
        return
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode) & 0o777)


@contextmanager
def named_errors(
    path: Path, *, partial: Path | None = None, kept: str | None = None
) -> Iterator[None]:
    """Make OSErrors name ``path`` if they name no file or ``partial``; add the note ``kept``."""
    try:
        yield
    except OSError as error:
        ours = (None, str(partial), str(path))
        if error.errno is None or error.filename not in ours:
            raise
        named = OSError(error.errno, error.strerror or str(error), str(path))
        if kept is not None:
            named.add_note(kept)
        raise named from error
