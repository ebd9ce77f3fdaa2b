"""File tier: bytes of any range come back, an orderly end, and clear errors of faulty disks."""

import errno
import gc
import mmap
import os
import threading
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from sppo.offload.disk import disk_room as disk_module
from sppo.offload.disk import file_tier as file_tier_module
from sppo.offload.disk.disk_room import DiskRoom, disk_room, is_memory
from sppo.offload.disk.file_tier import PIECE_BYTES, SECTOR_BYTES, FileTier, covered_s
from sppo.offload.worker_pool import wait_for
from sppo.units import GIB, KIB, MIB
from tests.offload.test_arena import resident_pages

SIZE = 20 * MIB + SECTOR_BYTES  # requests of all of it have three pieces
ROOT = Path(__file__).parents[3]


def made(directory, size_bytes):
    tier = FileTier()
    tier.open(directory, size_bytes)
    return tier


@pytest.fixture(params=["direct", "buffered"])
def opened(request, tmp_path, monkeypatch):
    """Opens tiers in an empty directory, which stays empty."""
    tiers = []
    if request.param == "buffered":
        monkeypatch.setattr(file_tier_module, "_pass_page_cache", lambda file: False)

    def open_tier(size_bytes=SIZE):
        tiers.append(made(tmp_path, size_bytes))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        assert tier.close()
        assert tier.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def disk(monkeypatch):
    """Lets a function of (write, offset, transfer) stand for the disk."""
    system = file_tier_module._system_io

    def play(disk):
        def io(file, write, memory, offset):
            return disk(write, offset, lambda: system(file, write, memory, offset))

        monkeypatch.setattr(file_tier_module, "_system_io", io)

    return play


class Gate:
    """A disk on which nothing moves until it is opened."""

    def __init__(self):
        self.open, self.asked = threading.Event(), threading.Event()

    def __call__(self, write, offset, transfer):
        self.asked.set()
        assert self.open.wait(30)
        return transfer()


def some_bytes(size_bytes, seed=0):
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), dtype=np.uint8)
    memory[:] = np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)
    return memory


def nameless_files():
    """Of this process, by path below /proc."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(path).endswith(" (deleted)"):
                found.add(str(path))
        except OSError:
            continue  # the one that listed them
    return found


def test_many_in_flight_against_plain_memory(opened):
    """Ranges that meet and do not overlap, written and read at once, in random order."""
    tier, random = opened(), np.random.default_rng(7)
    model = np.zeros(SIZE, dtype=np.uint8)
    for most_sectors in (3, 100, 3 * PIECE_BYTES // SECTOR_BYTES):
        ends = np.cumsum(random.integers(1, most_sectors, 64)) * SECTOR_BYTES
        cuts = [0, *ends[ends < SIZE].tolist(), SIZE]
        ranges = list(zip(cuts[:-1], cuts[1:], strict=True))
        random.shuffle(ranges)
        transfers, reads = [], []
        for number, (start, stop) in enumerate(ranges):
            part = some_bytes(stop - start, seed=number)
            if number % 2:
                model[start:stop] = part
                transfers.append(tier.write(start, part))
            else:
                reads.append((start, part))
                transfers.append(tier.read(start, part))
        for transfer in transfers[::-1]:
            wait_for(transfer)
            assert transfer.done()
        for start, part in reads:
            assert np.array_equal(part, model[start : start + len(part)])
        whole = some_bytes(SIZE)
        wait_for(tier.read(0, whole))
        assert np.array_equal(whole, model)


def test_the_space_is_taken_at_once_and_nothing_stays_in_the_page_cache(opened):
    before = nameless_files()
    tier = opened(SIZE - 1)
    [path] = nameless_files() - before
    assert os.stat(path).st_blocks * 512 >= SIZE
    assert os.stat(path).st_size == SIZE
    if is_memory(tier.directory):
        pytest.skip("the file system is itself memory")
    data = some_bytes(16 * MIB)
    wait_for(tier.write(0, data))
    wait_for(tier.read(0, data))
    fd = os.open(path, os.O_RDONLY)
    view = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
    os.close(fd)
    # Next to nothing: what someone else holds at that moment cannot be dropped.
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    assert resident_pages(address, SIZE) * mmap.PAGESIZE < MIB


def test_a_file_system_that_refuses_to_pass_the_page_cache(tmp_path, monkeypatch):
    """At the flag, or only at the first transfer: the tier works through the page cache."""
    refusing = mock.Mock(side_effect=OSError(errno.EINVAL, "not here"))
    monkeypatch.setattr(file_tier_module.os, "pwritev", refusing)
    tier = made(tmp_path, MIB)
    monkeypatch.undo()
    assert not tier.direct
    sent, back = some_bytes(MIB), some_bytes(MIB, seed=1)
    wait_for(tier.read(0, back, after=[tier.write(0, sent)]))
    assert np.array_equal(sent, back)
    tier.close()


@pytest.mark.parametrize(
    ("offset", "array", "message"),
    [
        (-SECTOR_BYTES, some_bytes(SECTOR_BYTES), "a range of the tier"),
        (SECTOR_BYTES, some_bytes(SECTOR_BYTES), "a range of the tier"),
        (1, some_bytes(SECTOR_BYTES), "not whole sectors"),
        (0, some_bytes(SECTOR_BYTES)[:-1], "not whole sectors"),
        (0, some_bytes(2 * SECTOR_BYTES)[1 : SECTOR_BYTES + 1], "not whole sectors"),
    ],
)
def test_what_it_cannot_move_is_refused(opened, offset, array, message):
    tier = opened(SECTOR_BYTES)
    for start in (tier.write, tier.read):
        with pytest.raises(AssertionError, match=message):
            start(offset, array)


def test_short_counts_are_continued(opened, disk):
    """Told counts: past the page cache the system itself stops at sectors only."""
    disk(lambda write, offset, transfer: min(transfer(), SECTOR_BYTES))
    tier, sent, back = opened(), some_bytes(200 * KIB), some_bytes(200 * KIB, seed=1)
    wait_for(tier.write(PIECE_BYTES - 100 * KIB, sent))
    wait_for(tier.read(PIECE_BYTES - 100 * KIB, back))
    assert np.array_equal(back, sent)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ENODEV])
@pytest.mark.parametrize("write", [True, False])
def test_a_fault_is_told(opened, disk, tmp_path, write, code):
    def failing(write_, offset, transfer):
        if write_ == write and offset >= PIECE_BYTES:
            raise OSError(code, "no")
        return transfer()

    disk(failing)
    tier, array = opened(), some_bytes(2 * PIECE_BYTES)
    asked = (tier.write if write else tier.read)(SECTOR_BYTES, array)
    for _ in range(2):
        with pytest.raises(OSError, match="failed") as caught:
            wait_for(asked)
        assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path))
    verb, advice = "writing" if write else "reading", file_tier_module._ADVICE.get(code, "name a")
    failed = f"the disk failed while {verb} 8.0 MiB at byte {SECTOR_BYTES + PIECE_BYTES}: "
    assert caught.value.strerror.startswith(failed)
    assert advice in str(caught.value)
    if write:
        with pytest.raises(OSError, match="failed"):
            tier.write(0, array)


def test_a_fault_is_told_once_all_pieces_have_ended(opened, disk):
    """Until then the array belongs to the transfer."""
    gate = Gate()

    def failing(write, offset, transfer):
        if offset == 0:
            assert gate.asked.wait(30)
            raise MemoryError("no memory")
        return gate(write, offset, transfer)

    disk(failing)
    reading = opened().read(0, some_bytes(2 * PIECE_BYTES))
    threading.Timer(0.05, gate.open.set).start()
    with pytest.raises(MemoryError, match="no memory"):
        wait_for(reading)
    assert gate.open.is_set()


def test_a_disk_that_moves_nothing_is_faulty(opened, disk):
    disk(lambda write, offset, transfer: 0)
    tier = opened()
    for start in (tier.write, tier.read):
        with pytest.raises(OSError, match="the disk is faulty"):
            wait_for(start(0, some_bytes(MIB)))


def test_an_array_lives_until_its_transfer_is_done(opened, disk):
    gate = Gate()
    disk(gate)
    tier, array = opened(), some_bytes(MIB)
    alive = weakref.ref(array)
    asked = tier.write(0, array)
    del array
    gc.collect()
    assert alive() is not None
    gate.open.set()
    wait_for(asked)
    back = some_bytes(MIB, seed=1)
    wait_for(tier.read(0, back))
    assert np.array_equal(back, some_bytes(MIB))
    del asked
    gc.collect()
    assert alive() is None


def test_more_than_the_disk_has_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(file_tier_module, "disk_room", lambda _: DiskRoom(100 * GIB))
    before = nameless_files()
    with pytest.raises(OSError, match="does not fit") as caught:
        made(tmp_path, 91 * GIB)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.strerror == (
        f"a file tier of 91.0 GiB in {tmp_path} does not fit: 100.0 GiB are free there, of which "
        "10.0 GiB stay free for everything else; offload less, free space, or name a directory on "
        "another disk"
    )
    assert nameless_files() == before


def test_a_disk_that_fills_up_meanwhile_is_refused(tmp_path, monkeypatch):
    """What the look at the disk allowed, and setting the space aside did not get."""
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))
    monkeypatch.setattr(file_tier_module.os, "posix_fallocate", full)
    before = nameless_files()
    with pytest.raises(OSError, match=r"does not fit: .* are free there") as caught:
        made(tmp_path, MIB)
    assert caught.value.errno == errno.ENOSPC
    assert nameless_files() == before


def test_a_directory_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no file tier of 1\.0 MiB in .*absent: No such"):
        made(tmp_path / "absent", MIB)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="make it, or name a directory that is there"):
        made(tmp_path / "file", MIB)
    place = tmp_path / "closed"
    place.mkdir(mode=0o500)
    if os.access(place, os.W_OK):  # as root; /sys lets not even root make a file
        place = Path("/sys")
        monkeypatch.setattr(file_tier_module, "disk_room", lambda _: DiskRoom(100 * GIB))
    with pytest.raises(OSError, match="name a directory that this user can write") as caught:
        made(place, MIB)
    assert caught.value.errno in (errno.EACCES, errno.EPERM, errno.EROFS)


def test_the_reserve_is_a_tenth_and_has_an_end():
    assert DiskRoom(10 * GIB).usable_bytes == 9 * GIB
    assert DiskRoom(1000 * GIB).usable_bytes == 984 * GIB
    assert DiskRoom(0).usable_bytes == 0
    assert disk_room(Path("/")).free_bytes > 0


def test_seconds_are_busy_while_at_least_one_piece_is_moved(opened):
    assert covered_s([(10.0, 12.0), (1.0, 4.0), (2.0, 3.0), (3.0, 5.0)]) == 4.0 + 2.0
    tier = opened()
    wait_for(tier.write(0, some_bytes(MIB)))
    assert tier.take_s()[0] > 0.0
    assert tier.take_s() == (0.0, 0.0)


def test_a_disk_that_is_memory_is_told(tmp_path, monkeypatch, caplog):
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
        made(tmp_path, 1).close()
        assert ("is memory, not a disk" in caplog.text) == told
    mounts.unlink()
    assert not is_memory(tmp_path)
