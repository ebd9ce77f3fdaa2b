"""File tier, native and in Python: bytes of any range, an orderly end, clear errors."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from sppo.kernels.native.native_file import SECTOR_BYTES
from sppo.offload.disk import disk_room as disk_module
from sppo.offload.disk import file_tier as file_tier_module
from sppo.offload.disk.disk_room import DiskRoom, disk_room, is_memory
from sppo.offload.disk.file_tier import FileTier
from sppo.units import GIB, KIB, MIB
from tests.native_builds import ROOT, library
from tests.tiers import each_once

SIZE = 20 * MIB + 5  # requests of all of it have three blocks


@pytest.fixture(params=["direct", "buffered", "python"])
def implementation(request, monkeypatch) -> str:
    """Every test runs on all; what they promise does not differ."""
    chosen = None if request.param == "python" else library()
    monkeypatch.setattr(file_tier_module, "native_library", lambda: chosen)
    return str(request.param)


@pytest.fixture
def opened(implementation, tmp_path):
    """Opens tiers in an empty directory, which stays empty."""
    tiers = []

    def open_tier(size_bytes: int = SIZE, *, threads: int = 4) -> FileTier:
        direct = implementation == "direct"
        tiers.append(FileTier(tmp_path, size_bytes, threads=threads, direct=direct))
        assert tiers[-1].direct <= direct
        return tiers[-1]

    yield open_tier
    assert list(tmp_path.iterdir()) == []
    for tier in tiers:
        tier.close(cancel=True)
    assert list(tmp_path.iterdir()) == []


def random_bytes(size_bytes: int, *, misaligned_by: int = 0, seed: int = 0) -> np.ndarray:
    """On a page boundary, or so many bytes behind one."""
    memory = np.frombuffer(mmap.mmap(-1, size_bytes + misaligned_by + 1), dtype=np.uint8)
    memory[:] = np.random.default_rng(seed).integers(0, 256, len(memory), dtype=np.uint8)
    return memory[misaligned_by : misaligned_by + size_bytes]


def nameless_files() -> set[str]:
    """Of this process, by path below /proc."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(path).endswith(" (deleted)"):
                found.add(str(path))
        except OSError:
            continue  # the one that listed them
    return found


def test_both_sides_know_the_same_sector():
    header = (ROOT / "csrc/file_tier.h").read_text()
    assert f"#define SPPO_FILE_SECTOR_BYTES {SECTOR_BYTES}\n" in header


RANGES = [
    (0, SIZE),
    (0, 1),
    (SIZE - 1, 1),
    (SIZE, 0),
    (SECTOR_BYTES, 3 * SECTOR_BYTES),
    (SECTOR_BYTES - 1, 2),
    (100, 8 * MIB),
    (8 * MIB - 512, 9 * MIB + 777),
]
"""Offset and size of requests."""


@pytest.mark.parametrize(("requested", "misaligned_by"), each_once(RANGES, [0, 16, 1]), ids=str)
def test_bytes_come_back(opened, requested, misaligned_by):
    tier, (offset, size) = opened(), requested
    sent = random_bytes(size, misaligned_by=misaligned_by)
    tier.write(offset, sent).wait()
    back = random_bytes(size, misaligned_by=misaligned_by, seed=1)
    transfer = tier.read(offset, back)
    transfer.wait()
    transfer.wait()
    assert transfer.done()
    assert np.array_equal(back, sent)
    whole = np.empty(SIZE, dtype=np.uint8)
    tier.read(0, whole).wait()
    assert not whole[:offset].any()
    assert not whole[offset + size :].any()


def test_many_in_flight_against_plain_memory(opened):
    """Odd ranges that share sectors but no bytes, written and read at once, in random order."""
    tier, random = opened(threads=3), np.random.default_rng(7)
    model = np.zeros(SIZE, dtype=np.uint8)
    for size_limit in (3000, 300 * KIB, 5 * MIB):
        ends = np.cumsum(random.integers(0, size_limit, 64))
        cuts = [0, *ends[ends < SIZE].tolist(), SIZE]
        ranges = list(zip(cuts[:-1], cuts[1:], strict=True))
        random.shuffle(ranges)
        transfers, reads = [], []
        for number, (start, stop) in enumerate(ranges):
            part = random_bytes(stop - start, misaligned_by=number % 3, seed=number)
            if number % 2:
                model[start:stop] = part
                transfers.append(tier.write(start, part))
            else:
                reads.append((start, part))
                transfers.append(tier.read(start, part))
        for transfer in transfers[::-1]:
            transfer.wait()
        for start, part in reads:
            assert np.array_equal(part, model[start : start + len(part)])
        whole = np.empty(SIZE, dtype=np.uint8)
        tier.read(0, whole).wait()
        assert np.array_equal(whole, model)


def test_many_threads_ask_at_once(opened):
    tier = opened(8 * 100 * KIB)

    def work(number: int) -> None:
        back = np.empty(100 * KIB, dtype=np.uint8)
        for round_ in range(20):
            sent = np.full(100 * KIB, 8 * round_ + number, dtype=np.uint8)
            tier.write(number * 100 * KIB, sent).wait()
            tier.read(number * 100 * KIB, back).wait()
            same.append(np.array_equal(sent, back))

    same: list[bool] = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 160


def test_two_tiers_in_one_directory_never_meet(opened):
    one, other = opened(), opened()
    one.write(0, random_bytes(MIB, seed=1)).wait()
    other.write(0, random_bytes(MIB, seed=2)).wait()
    back = np.empty(MIB, dtype=np.uint8)
    one.read(0, back).wait()
    assert np.array_equal(back, random_bytes(MIB, seed=1))


def test_a_directory_may_go_while_its_tier_is_there(implementation, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    with FileTier(place, MIB) as tier:
        place.rmdir()
        tier.write(0, random_bytes(MIB)).wait()
        back = np.empty(MIB, dtype=np.uint8)
        tier.read(0, back).wait()
        assert np.array_equal(back, random_bytes(MIB))


def test_the_space_is_taken_at_once_and_nothing_stays_in_the_page_cache(opened):
    if not Path("/proc/self/fd").exists():
        pytest.skip("the system does not show open files")
    before = nameless_files()
    tier = opened()
    [path] = nameless_files() - before
    assert os.stat(path).st_blocks * 512 >= SIZE
    assert os.stat(path).st_size == -(-SIZE // SECTOR_BYTES) * SECTOR_BYTES
    if is_memory(tier.directory):
        pytest.skip("the file system is itself memory")
    aligned = random_bytes(16 * MIB)
    tier.write(0, aligned).wait()
    tier.read(0, aligned).wait()
    fd = os.open(path, os.O_RDONLY)
    view = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
    os.close(fd)
    # Next to nothing: what someone else holds at that moment cannot be dropped.
    assert resident_pages(np.frombuffer(view, dtype=np.uint8)) * mmap.PAGESIZE < MIB


def resident_pages(memory: np.ndarray) -> int:
    found = (ctypes.c_ubyte * -(-len(memory) // mmap.PAGESIZE))()
    address = ctypes.c_void_p(memory.ctypes.data)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(memory)), found) == 0
    return sum(byte & 1 for byte in found)


def test_what_was_moved_is_counted(opened):
    tier = opened()
    tier.write(0, random_bytes(SIZE)).wait()
    tier.read(5, random_bytes(MIB)).wait()
    seen = tier.statistics
    assert (seen.written_bytes, seen.read_bytes) == (SIZE, MIB)
    assert 0 < seen.write_s < 10
    assert 0 < seen.read_s < 10
    tier.close()
    assert tier.statistics == seen


def test_it_says_what_it_is(opened, implementation, tmp_path):
    tier = opened()
    how = "past the page cache" if tier.direct else "through the page cache"
    assert str(tier) == f"file tier of 20.0 MiB in {tmp_path}: {how}, 4 threads"
    assert tier.memory_alignment_bytes == 1 or tier.direct
    assert SECTOR_BYTES % tier.memory_alignment_bytes == 0


@pytest.mark.parametrize(
    ("offset", "array", "message"),
    [
        (-1, np.zeros(1, np.uint8), "bytes -1 to 0 are not within the tier's 4096"),
        (4096, np.zeros(1, np.uint8), "bytes 4096 to 4097 are not within"),
        (0, np.zeros(4097, np.uint8), "bytes 0 to 4097 are not within"),
        (0, np.zeros(4, np.float32), "moves contiguous bytes, not float32"),
        (0, np.zeros((4, 4), np.uint8)[:, :2], "moves contiguous bytes"),
    ],
)
def test_what_it_cannot_move_is_refused(opened, offset, array, message):
    tier = opened(4096)
    for start in (tier.write, tier.read):
        with pytest.raises(ValueError, match=message):
            start(offset, array)


def test_a_read_only_array_can_be_written_and_not_read_into(opened):
    array = np.frombuffer(b"four", dtype=np.uint8)
    tier = opened(4096)
    tier.write(0, array).wait()
    with pytest.raises(ValueError, match="read-only"):
        tier.read(0, array)
    back = np.empty((2, 2), dtype=np.uint8)
    tier.read(0, back).wait()
    assert back.tobytes() == b"four"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size_bytes": 0}, "size_bytes=0; a file tier has at least 1 byte"),
        ({"size_bytes": -5}, "size_bytes=-5"),
        ({"size_bytes": 1, "threads": 0}, "threads=0; at least one thread"),
    ],
)
def test_sizes_and_threads_start_at_one(implementation, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        FileTier(tmp_path, **arguments)


def test_more_than_the_disk_has_is_refused_before_anything_is_written(
    implementation, tmp_path, monkeypatch
):
    monkeypatch.setattr(file_tier_module, "disk_room", lambda _: DiskRoom(100 * GIB))
    before = nameless_files()
    with pytest.raises(OSError, match="does not fit") as caught:
        FileTier(tmp_path, 91 * GIB)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.strerror == (
        f"a file tier of 91.0 GiB in {tmp_path} does not fit: 100.0 GiB are free there, of which "
        "10.0 GiB stay free for everything else; offload less, free space, or name a directory on "
        "another disk"
    )
    assert list(tmp_path.iterdir()) == []
    assert nameless_files() == before


def test_a_disk_that_fills_up_meanwhile_is_refused(implementation, tmp_path, monkeypatch):
    """What the look at the disk allowed, and setting the space aside did not get."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("sppo.kernels.native.extension.NativeFile", full)
    monkeypatch.setattr("sppo.offload.disk.python_file._reserve_space", full)
    before = nameless_files()
    with pytest.raises(OSError, match=r"does not fit: .* are free there") as caught:
        FileTier(tmp_path, MIB)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []
    assert nameless_files() == before


def test_a_directory_that_is_not_there_is_refused(implementation, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file tier of 1\.0 MiB in .*absent: No such"):
        FileTier(tmp_path / "absent", MIB)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="make it, or name a directory that is there"):
        FileTier(tmp_path / "file", MIB)


def test_a_directory_that_cannot_be_written_is_refused(implementation, tmp_path, monkeypatch):
    place: Path = tmp_path / "closed"
    place.mkdir(mode=0o500)
    if os.access(place, os.W_OK):  # as root; /sys lets not even root make a file
        place = Path("/sys")
        monkeypatch.setattr(file_tier_module, "disk_room", lambda _: DiskRoom(100 * GIB))
        if not place.exists():
            pytest.skip("every directory can be written")
    with pytest.raises(OSError, match="name a directory that this user can write") as caught:
        FileTier(place, MIB)
    assert caught.value.errno in (errno.EACCES, errno.EPERM, errno.EROFS)


def test_the_reserve_is_a_tenth_and_has_an_end():
    assert DiskRoom(10 * GIB).usable_bytes == 9 * GIB
    assert DiskRoom(1000 * GIB).usable_bytes == 984 * GIB
    assert DiskRoom(0).usable_bytes == 0
    assert disk_room(Path("/")).free_bytes > 0


def test_a_disk_that_is_memory_is_told(implementation, tmp_path, monkeypatch, caplog):
    mounts = tmp_path / "mountinfo"
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    monkeypatch.setattr(disk_module, "_MOUNTS", mounts)
    for file_system, told in (("tmpfs", True), ("ext4", False)):
        caplog.clear()
        mounts.write_text(
            f"20 1 0:999 / /proc rw shared:1 - proc proc rw\n"
            f"36 35 {number} / / rw,noatime master:1 - {file_system} none rw\n"
        )
        FileTier(tmp_path, 1).close()
        assert ("is memory, not a disk" in caplog.text) == told
    mounts.unlink()
    assert not is_memory(tmp_path)


SCRIPT = """
import os, sys, time, numpy as np
from sppo.kernels.native.extension import NativeLibrary
from sppo.offload.disk import file_tier as f
from tests.native_builds import library
f.native_library = library if sys.argv[1] == "native" else lambda: None
tier = f.FileTier(sys.argv[2], 64 << 20)
transfers = [tier.write(i << 20, np.full(1 << 20, i, dtype=np.uint8)) for i in range(64)]
"""


@pytest.mark.parametrize("chosen", ["native", "python"])
def test_a_killed_process_leaves_nothing(tmp_path, chosen):
    library()
    code = SCRIPT + "print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code, chosen, tmp_path], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chosen", ["native", "python"])
def test_a_program_may_end_or_fork_with_requests_in_flight(tmp_path, chosen):
    library()
    code = SCRIPT + (
        "if os.fork() == 0:\n"
        "    try:\n"
        "        tier.write(0, np.zeros(1, dtype=np.uint8)).wait()\n"
        "    except OSError as error:\n"
        "        tier.close()\n"
        "        print('fork', error.errno, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "transfers[0].wait()\n"
        "for i in range(64):\n"
        "    transfers.append(tier.write(i << 20, np.full(1 << 20, i, dtype=np.uint8)))\n"
        "print('end', flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, chosen, tmp_path], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, f"fork {errno.ECHILD}\nend\n"), done.stderr
    assert done.stderr == ""
