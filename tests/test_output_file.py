"""Output files are complete or absent, and errors name the file."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sppo.output_file import (
    check_output_files,
    whole_file,
    write_bytes,
    write_json,
    write_text,
)

OLD, NEW = b"the older file", b"a longer file that is to replace it"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(OLD)
    return tmp_path / "file"


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size, for a short time: the output of pytest may be one as well."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def assert_kept(path: Path, error: OSError) -> None:
    assert error.filename == str(path)
    assert error.__notes__ == ["the older file is kept"]
    assert path.read_bytes() == OLD
    assert [file.name for file in path.parent.iterdir()] == [path.name]


# Whole or absent


@pytest.mark.parametrize("written", [0, 1, len(NEW) - 1])
def test_a_write_that_fails_at_any_byte(path, written):
    with pytest.raises(OSError, match="File too large") as caught, file_size_limit(written):
        write_bytes(path, NEW)
    assert_kept(path, caught.value)


@pytest.mark.parametrize("call", ["fsync", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_after_the_last_byte(path, monkeypatch, call, number):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*{"fsync": (os, "fsync"), "rename": (Path, "replace")}[call], fail)
    with pytest.raises(OSError, match="file") as caught:
        write_bytes(path, NEW)
    assert caught.value.errno == number
    assert_kept(path, caught.value)


def test_a_file_system_that_cannot_flush_directories(path, monkeypatch):
    whole = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_bytes(path, NEW)
    assert path.read_bytes() == NEW


def test_an_exception_while_writing(path):
    def interrupted() -> None:
        with whole_file(path) as file:
            file.write(NEW)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == OLD
    assert len(list(path.parent.iterdir())) == 1


def test_an_error_of_another_file_keeps_its_name(path):
    with pytest.raises(FileNotFoundError) as caught, whole_file(path):
        open("/nowhere/else")  # noqa: SIM115
    assert caught.value.filename == "/nowhere/else"


def test_nothing_is_left_of_a_new_file(tmp_path):
    with pytest.raises(OSError, match="File too large") as caught, file_size_limit(3):
        write_bytes(tmp_path / "new", NEW)
    assert caught.value.__notes__ == ["nothing was written"]
    assert list(tmp_path.iterdir()) == []


# What stands at the path


def test_a_link_stays_and_the_file_keeps_its_permissions(path):
    path.chmod(0o640)
    link = path.with_name("link")
    link.symlink_to("file")
    write_bytes(link, NEW)
    assert link.is_symlink()
    assert path.read_bytes() == NEW
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_name_as_long_as_the_file_system_allows(tmp_path):
    write_bytes(tmp_path / ("n" * 255), NEW)
    with pytest.raises(OSError, match="File name too long"):
        write_bytes(tmp_path / ("n" * 256), NEW)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_directory_is_not_replaced(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_bytes(tmp_path / "taken", NEW)
    assert caught.value.filename == str(tmp_path / "taken")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def test_devices_and_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/null"), tmp_path / "pipe"):
        with pytest.raises(OSError, match="a device, a pipe, or what"):
            write_bytes(path, NEW)
        with pytest.raises(ValueError, match=f"-o {path}: a device, .* give another name"):
            check_output_files({"-o": path})


def test_a_file_that_is_printed_to_is_refused(tmp_path):
    script = "import sppo.output_file as o; o.write_text('/dev/stdout', 'in its place')"
    with (tmp_path / "out").open("wb") as out:
        run = subprocess.run([sys.executable, "-c", script], stdout=out, stderr=subprocess.PIPE)
    assert b"or what this command prints" in run.stderr
    assert (tmp_path / "out").read_bytes() == b""


# Before the work


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (".", "is a directory; name a file in it"),
        ("file.txt", "end the name in .png"),
        ("none/file.png", "there is no directory none"),
        ("input.png", "is read by this command"),
        ("n" * 300 + ".png", "File name too long"),
        ("loop.png", "Too many levels of symbolic links"),
    ],
)
def test_what_cannot_be_written_is_refused_and_untouched(tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    Path("input.png").touch()
    Path("loop.png").symlink_to("loop.png")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=f"--png .*{says}"):
        check_output_files({"--png": Path(name)}, plots=["--png"], inputs=[Path("input.png")])
    assert sorted(tmp_path.iterdir()) == before


def test_two_options_with_one_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--trace .* --png is another file of this command"):
        check_output_files({"--png": tmp_path / "a.png", "--trace": tmp_path / "x/../a.png"})


def test_a_directory_that_cannot_be_written_to_is_refused(path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda name, mode: Path(name) != path.parent)
    with pytest.raises(ValueError, match=f"the directory {path.parent} cannot be written to"):
        check_output_files({"-o": path})


def test_text_is_utf_8(tmp_path):
    write_text(tmp_path / "text", "→\n")
    assert (tmp_path / "text").read_bytes() == "→\n".encode()


def test_json_is_indented_and_finite(path: Path):
    value = {"a": [1, 2.5], "b": {"c": [], "d": None}, "e": '\n"', "f": {}}
    write_json(path, value)
    assert path.read_text() == json.dumps(value, indent=2) + "\n"
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": {"b": float("nan")}})
