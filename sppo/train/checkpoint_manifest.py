"""The manifest of a directory: size and checksums of every file, written last, checked first.

CRC-32 finds every burst of up to 32 wrong bits and misses other damage once in 4 billion; zlib's
runs at several GB/s a core, many times what cryptographic digests reach, and nobody is expected to
forge a checkpoint. Files are summed in blocks so that threads share one large file.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo.train.durable_files import write_json
from sppo.units import MIB

MANIFEST_FILE = "manifest.json"

_FORMAT_VERSION = 1
_CHECKSUM = "crc32 of each block, hexadecimal"
_BLOCK_BYTES = 64 * MIB
_READ_BYTES = 4 * MIB
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class Damage:
    """The first thing found wrong in a directory."""

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


@dataclass(frozen=True, slots=True)
class _Block:
    path: Path
    first: int
    size_bytes: int


def write_manifest(directory: Path) -> None:
    """List every file that ``directory`` holds now.

    Raises:
        OSError: a file cannot be read, or the manifest not be written.
    """
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    blocks = [b for name, size in sizes.items() for b in _blocks_of(directory / name, size)]
    files: dict[str, Any] = {
        name: {"size_bytes": size, "block_crc32": []} for name, size in sizes.items()
    }
    for block, checksum in zip(blocks, _checksums(blocks), strict=True):
        files[block.path.name]["block_crc32"].append(checksum)
    write_json(directory / MANIFEST_FILE, _header() | {"files": files})


def find_damage(directory: Path) -> Damage | None:
    """The first file of ``directory`` that is not what its manifest says; None if all are.

    Reads every byte. A file that cannot be read counts as damaged.
    """
    try:
        files = _read_manifest(directory / MANIFEST_FILE)
    except FileNotFoundError:
        return Damage(MANIFEST_FILE, "missing")
    except OSError as error:
        return Damage(MANIFEST_FILE, f"cannot be read: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Damage(MANIFEST_FILE, "not a manifest")
    for name, (size, _) in files.items():
        problem = _wrong_size(directory / name, size)
        if problem is not None:
            return Damage(name, problem)
    return _wrong_content(directory, files)


def _header() -> dict[str, Any]:
    return {
        "format_version": _FORMAT_VERSION,
        "checksum": _CHECKSUM,
        "block_bytes": _BLOCK_BYTES,
    }


def _read_manifest(path: Path) -> dict[str, tuple[int, list[str]]]:
    """Size and block checksums by file name."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if {key: manifest[key] for key in _header()} != _header():
        raise ValueError("another format, or a flipped bit")
    files = {
        name: (entry["size_bytes"], entry["block_crc32"])
        for name, entry in manifest["files"].items()
    }
    if not files:
        raise ValueError("no files")
    return files


def _wrong_size(path: Path, expected: int) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if size == expected else f"{size} bytes long, {expected} were written"


def _wrong_content(directory: Path, files: dict[str, tuple[int, list[str]]]) -> Damage | None:
    blocks: list[_Block] = []
    expected: list[str] = []
    for name, (size, checksums) in files.items():
        of_file = list(_blocks_of(directory / name, size))
        if len(of_file) != len(checksums):
            return Damage(MANIFEST_FILE, f"{len(checksums)} checksums for {name} of {size} bytes")
        blocks += of_file
        expected += checksums
    try:
        for block, checksum, wanted in zip(blocks, _checksums(blocks), expected, strict=True):
            if checksum != wanted:
                last = block.first + block.size_bytes
                problem = f"bytes {block.first}-{last} are not those that were written"
                return Damage(block.path.name, f"{problem} (checksum {checksum}, not {wanted})")
    except OSError as error:
        return Damage(Path(error.filename or "").name, f"cannot be read: {error.strerror}")
    return None


def _blocks_of(path: Path, size_bytes: int) -> Iterator[_Block]:
    for first in range(0, size_bytes, _BLOCK_BYTES):
        yield _Block(path, first, min(_BLOCK_BYTES, size_bytes - first))


def _checksums(blocks: list[_Block]) -> list[str]:
    # zlib lets go of the interpreter lock, so threads are enough.
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(_checksum, blocks))


def _checksum(block: _Block) -> str:
    crc, left = 0, block.size_bytes
    with block.path.open("rb", buffering=0) as file:
        file.seek(block.first)
        while left:
            try:
                data = file.read(min(_READ_BYTES, left))
            except OSError as error:
                # A failing disk reports no name by itself.
                raise OSError(error.errno, error.strerror, str(block.path)) from error
            if not data:
                break
            crc = zlib.crc32(data, crc)
            left -= len(data)
    return f"{crc:08x}"
