"""Manifest of a checkpoint directory: size and checksums of every file, written last.

CRC-32 detects every burst of up to 32 wrong bits, and misses other damage once in 4 billion. The
CRC-32 of zlib reaches several GB/s per core, many times the rate of cryptographic digests, and
forged checkpoints are not a concern. Checksums are per block, so that several threads read one
large file. Each rank sums the files that it wrote, and rank 0 writes the manifest.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

from pydantic import TypeAdapter

from sppo.output_file import write_json
from sppo.quoting import one_line
from sppo.units import MIB

MANIFEST_FILE = "manifest.json"
_SHARED = "train.output must be a directory that all ranks share"
_DELETED = "train.output was deleted or changed while the run wrote into it"

_FORMAT_VERSION = 1
_CHECKSUM = "crc32 of each block, hexadecimal"
_BLOCK_BYTES = 64 * MIB
_READ_BYTES = MIB
_MAX_THREADS = 8
_PROBLEM_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Damage:
    """First problem found in a checkpoint directory."""

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{one_line(self.file)}: {one_line(self.problem, most=_PROBLEM_CHARACTERS)}"


@dataclass(frozen=True, slots=True)
class FileSum:
    """Size and block checksums of a file, as it was written."""

    size_bytes: int
    block_crc32: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Manifest:
    format_version: int
    checksum: str
    block_bytes: int
    files: dict[str, FileSum]


_ADAPTER = TypeAdapter(_Manifest)


@dataclass(frozen=True, slots=True)
class _StoredBlock:
    path: Path
    first: int
    size_bytes: int


def why_absent(*, alone: bool) -> str:
    """Return the likely reason for a missing file: deleted (one rank), or not shared (several)."""
    return _DELETED if alone else _SHARED


def sum_files(paths: Iterable[Path]) -> dict[str, FileSum]:
    """Read files of one directory, and return their sizes and checksums by name.

    Raises:
        OSError: A file cannot be read.
    """
    sizes = {path: path.stat().st_size for path in paths}
    blocks = [block for path, size in sizes.items() for block in _blocks_of(path, size)]
    found: dict[Path, list[str]] = {path: [] for path in sizes}
    for block, checksum in zip(blocks, _checksums(blocks), strict=True):
        found[block.path].append(checksum)
    return {path.name: FileSum(size, tuple(found[path])) for path, size in sizes.items()}


def write_manifest(directory: Path, files: Mapping[str, FileSum], *, alone: bool = False) -> None:
    """Write the manifest of ``directory``, which lists its files, without those of exports.

    Args:
        directory: Directory of a checkpoint.
        files: Sizes and checksums of all files, by name.
        alone: Whether a single rank wrote all files.

    Raises:
        OSError: A file is missing here or has another size, e.g. because ranks do not share the
            directory; or the manifest cannot be written.
    """
    for name, file in files.items():
        problem = _wrong_size(directory / name, file.size_bytes)
        if problem is not None:
            writer = "just written" if alone else "written by another rank"
            raise OSError(errno.ENOENT, f"{name}, {writer}: {problem}; {why_absent(alone=alone)}")
    write_json(directory / MANIFEST_FILE, asdict(_manifest_of(files)))


def find_damage(directory: Path) -> Damage | None:
    """Return the first file of ``directory`` that differs from its manifest; None if none does.

    Reads every byte. A file that cannot be read counts as damaged.
    """
    files = _listed(directory)
    if isinstance(files, Damage):
        return files
    return _wrong_sizes(directory, files) or _wrong_content(directory, files)


def find_absence(directory: Path) -> Damage | None:
    """Return the first file that is missing or has a wrong size; None if there is none.

    For ranks that must see the files which rank 0 has verified; reads only the manifest.
    """
    files = _listed(directory)
    return files if isinstance(files, Damage) else _wrong_sizes(directory, files)


def _manifest_of(files: Mapping[str, FileSum]) -> _Manifest:
    return _Manifest(_FORMAT_VERSION, _CHECKSUM, _BLOCK_BYTES, dict(sorted(files.items())))


def _listed(directory: Path) -> dict[str, FileSum] | Damage:
    try:
        return _read_manifest(directory / MANIFEST_FILE)
    except FileNotFoundError:
        return Damage(MANIFEST_FILE, "missing")
    except OSError as error:
        return Damage(MANIFEST_FILE, f"cannot be read: {error.strerror}")
    except ValueError:
        return Damage(MANIFEST_FILE, "not a manifest")


def _read_manifest(path: Path) -> dict[str, FileSum]:
    manifest = _ADAPTER.validate_json(path.read_bytes(), strict=True)
    files = manifest.files
    if not files or manifest != _manifest_of(files):
        raise ValueError("no files, another format, or a flipped bit")
    if any(Path(name).name != name or not name.isprintable() for name in files):
        raise ValueError("names no file beside it")
    return files


def _wrong_sizes(directory: Path, files: Mapping[str, FileSum]) -> Damage | None:
    for name, file in files.items():
        problem = _wrong_size(directory / name, file.size_bytes)
        if problem is not None:
            return Damage(name, problem)
    return None


def _wrong_size(path: Path, expected: int) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if size == expected else f"{size} bytes long, {expected} were written"


def _wrong_content(directory: Path, files: Mapping[str, FileSum]) -> Damage | None:
    try:
        there = sum_files(directory / name for name in files)
    except OSError as error:
        return Damage(Path(error.filename or "").name, f"cannot be read: {error.strerror}")
    for name, file in files.items():
        sums = zip_longest(there[name].block_crc32, file.block_crc32)
        for number, (checksum, wanted) in enumerate(sums):
            if checksum != wanted:
                first, end = number * _BLOCK_BYTES, (number + 1) * _BLOCK_BYTES
                place = f"bytes {first}-{min(end, file.size_bytes)}"
                problem = f"{place} are not those that were written"
                return Damage(name, f"{problem} (checksum {checksum}, not {wanted})")
    return None


def _blocks_of(path: Path, size_bytes: int) -> Iterator[_StoredBlock]:
    for first in range(0, size_bytes, _BLOCK_BYTES):
        yield _StoredBlock(path, first, min(_BLOCK_BYTES, size_bytes - first))


def _checksums(blocks: list[_StoredBlock]) -> list[str]:
    # zlib releases the global interpreter lock, so threads run in parallel.
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(_checksum, blocks))


def _checksum(block: _StoredBlock) -> str:
    crc, left = 0, block.size_bytes
    buffer = memoryview(bytearray(_READ_BYTES))
    with block.path.open("rb", buffering=0) as file:
        file.seek(block.first)
        while left:
            try:
                count = file.readinto(buffer[: min(_READ_BYTES, left)])
            except OSError as error:
                # The error of a failing disk does not name the file.
                raise OSError(error.errno, error.strerror, str(block.path)) from error
            if not count:
                break
            crc = zlib.crc32(buffer[:count], crc)
            left -= count
    return f"{crc:08x}"
