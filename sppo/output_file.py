"""Output files: whole or absent, on a full disk and after the machine loses power as well.

A file is written under another name beside its own, flushed to the disk and then renamed. A reader
sees the old content or the new, never a mixture, and a failure leaves the older file as it was.
Devices, pipes and ``/dev/stdout`` are written as they are.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

PARTIAL = ".partial-"
"""Part of the name under which a file is written; found later, a killed process left it."""

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers for no space left, or a used-up quota of the user."""

_JSON = json.JSONEncoder(allow_nan=False)
_INDENTED_LEVELS = 4
_DESCRIPTOR = re.compile(r"/(?:proc/self|dev)/fd/(\d+)")
_MOST_LINKS = 40
_NAME_BYTES = 200
"""Bytes of a name that stay in front of the ending; common file systems allow 255 in all."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``path`` once the body has ended without an exception.

    Args:
        path: a link is followed; an existing file keeps its permissions.

    Raises:
        OSError: it cannot be written. The error names ``path``, and a note says what was kept.
    """
    path = Path(path)
    if _is_special(path):
        with named_errors(path), _open_in_place(path) as file:
            yield file
        return
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
    """Replace ``path`` by ``content``; raises as :func:`whole_file`."""
    with whole_file(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in UTF-8; raises as :func:`whole_file`."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as JSON, indented but for what lies deepest, such as rows.

    Raises:
        ValueError: a float that JSON has no word for (NaN or infinity).
        OSError: as :func:`whole_file`.
    """
    write_text(path, _indented(value, levels=_INDENTED_LEVELS) + "\n")


def _indented(value: Any, *, levels: int, line: str = "\n") -> str:
    """Return JSON whose outer levels are indented: the encoder that indents is slow."""
    if not value or levels == 0 or not isinstance(value, (dict, list, tuple)):
        return _JSON.encode(value)
    deeper = line + "  "
    items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    texts = (
        ("" if key is None else f"{_JSON.encode(str(key))}: ")
        + _indented(item, levels=levels - 1, line=deeper)
        for key, item in items
    )
    left, right = "{}" if isinstance(value, dict) else "[]"
    return f"{left}{deeper}{f',{deeper}'.join(texts)}{line}{right}"


def write_figure(path: Path, figure: Any, *, dpi: float | None = None) -> None:
    """Replace ``path`` by a PNG of a matplotlib figure; raises as :func:`whole_file`.

    Args:
        path: file to write, whatever its ending.
        figure: a ``matplotlib.figure.Figure``.
        dpi: pixels per inch; None for the figure's own.
    """
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi="figure" if dpi is None else dpi)
    write_bytes(path, drawn.getvalue())


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable: fsync of a file does not cover its name.

    Some network file systems cannot, and say so with EINVAL: names are as durable as they get.
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
    """Find out before any work whether files can be written; leaves everything as it is.

    Args:
        files: by the option that names each; None where it was not given.
        plots: options whose files are PNG plots, and must be called so.
        plans: options whose files are plans, which ``sppo simulate`` tells by their name.
        inputs: files that the command reads, which it must not replace.

    Raises:
        ValueError: one cannot be written, and why.
        OSError: the disk is full.
    """
    named = {os.path.realpath(path): f"{path} is read by this command" for path in inputs}
    for option, path in files.items():
        if path is None:
            continue
        if os.path.isdir(path):
            raise ValueError(f"{option} {path}: is a directory; name a file in it")
        if _is_special(path):
            continue
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
    """Find out whether a directory can be made at ``path``, parents included; changes nothing.

    Raises:
        ValueError: it cannot, and why.
    """
    nearest = next(p for p in path.absolute().parents if os.path.lexists(p))
    if not nearest.is_dir():
        raise ValueError(f"{path}: {nearest} is not a directory; give another name")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: the directory {nearest} cannot be written to; give another name")


def check_unused_directory(directory: Path) -> None:
    """Check that ``directory`` can be made, or is empty.

    Raises:
        ValueError: it holds something, is no directory, or may not be written.
    """
    if directory.is_symlink() and not directory.exists():
        raise ValueError(f"{directory} is a link to nowhere; name a new directory")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; name a new directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty and is left as it is; name a new directory")
    check_new_directory(directory)


def _check_place(option: str, path: Path) -> None:
    """Try to write beside ``path``, as :func:`whole_file` will."""
    target = Path(os.path.realpath(path))
    parent = target.parent if os.path.islink(path) else path.parent
    if not os.path.isdir(parent):
        raise ValueError(f"{option} {path}: there is no directory {parent}")
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise ValueError(f"{option} {path}: is write-protected; give another name")
    partial = _partial_name(target)
    try:
        _check_name(path)
        with partial.open("xb") as file:
            file.write(b"\0")
    except OSError as error:
        if error.errno in FULL_ERRNOS:
            raise OSError(error.errno, error.strerror, f"{option} {path}") from None
        raise ValueError(
            f"{option} {path}: the directory {parent} cannot be written to: {error.strerror}"
        ) from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _check_name(path: Path) -> None:
    """Raise OSError where no file can be called so: a name too long, a link to itself."""
    with suppress(FileNotFoundError):
        path.stat()


def _partial_name(target: Path) -> Path:
    """A name of its own for each write, so that two processes never write the same file."""
    start = os.fsdecode(os.fsencode(target.name)[:_NAME_BYTES])
    return target.with_name(f"{start}{PARTIAL}{uuid.uuid4().hex[:12]}")


def _take_permissions(file: BinaryIO, target: Path) -> None:
    """Give ``file`` the permissions of the file it is to replace, if there is one."""
    if not target.exists():
        return
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode) & 0o777)


def _is_special(path: Path) -> bool:
    """Return whether ``path`` is written in place: a device, a pipe, an open descriptor."""
    if _descriptor(path) is not None:
        return True
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _open_in_place(path: Path) -> BinaryIO:
    """Open a special file for writing."""
    number = _descriptor(path)
    if number is None:
        return path.open("wb")
    return os.fdopen(os.dup(number), "wb")  # shares its position with what else is written there


def _descriptor(path: Path) -> int | None:
    """The number that ``/dev/stdout``, ``/dev/fd/3`` and links to them stand for."""
    for _ in range(_MOST_LINKS):
        match = _DESCRIPTOR.fullmatch(os.path.normpath(path.absolute()))
        if match is not None:
            return int(match[1])
        if not os.path.islink(path):
            return None
        path = path.parent / path.readlink()
    return None


@contextmanager
def named_errors(
    path: Path, *, partial: Path | None = None, kept: str | None = None
) -> Iterator[None]:
    """Name ``path`` in an OSError that names no file, or ``partial``; add what was kept."""
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
