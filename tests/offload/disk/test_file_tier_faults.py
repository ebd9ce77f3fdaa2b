"""File tier on disks that fail, stall or complete half of a request, and its shutdown."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sppo.kernels.native.native_file import BLOCK_BYTES, NativeFile
from sppo.offload.disk import file_tier as file_tier_module
from sppo.offload.disk import python_file as python_file
from sppo.offload.disk.file_tier import FileTier, Transfer
from sppo.units import MIB
from tests.native_builds import ROOT, c_compiler, library
from tests.tiers import exhaustive

SIZE = 4 * BLOCK_BYTES

Disk = Callable[[bool, int, Callable[[], int]], int]
"""Given whether it is a write, the offset, and the transfer itself: the count, or an OSError."""

IO = ctypes.CFUNCTYPE(
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_uint64,
)
"""``sppo_file_io`` of csrc/file_tier.h."""


@pytest.fixture(params=["direct", "buffered", "python"])
def on_disk(request, monkeypatch, tmp_path):
    """Opens a tier on a disk that the test plays."""
    chosen = None if request.param == "python" else library()
    monkeypatch.setattr(file_tier_module, "native_library", lambda: chosen)
    system = python_file._system_io
    kept: list[object] = []

    def open_tier(disk: Disk, *, threads: int = 2) -> FileTier:
        def io(_: object, write: int, fd: int, address: int, size: int, offset: int) -> int:
            memory = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
            try:
                return disk(bool(write), offset, lambda: system(fd, bool(write), memory, offset))
            except OSError as error:
                return -(error.errno or errno.EIO)

        def python_io(fd: int, write: bool, memory: memoryview, offset: int) -> int:
            return disk(write, offset, lambda: system(fd, write, memory, offset))

        tier = FileTier(tmp_path, SIZE, threads=threads, direct=request.param == "direct")
        kept.append(tier)
        if isinstance(tier._file, NativeFile):
            assert chosen is not None
            kept.append(IO(io))
            file = ctypes.byref(tier._file._file)
            assert chosen._library.sppo_file_set_io(file, kept[-1], None) == 0
        else:
            monkeypatch.setattr(python_file, "_system_io", python_io)
        return tier

    yield open_tier
    for tier in kept:
        if isinstance(tier, FileTier):
            tier.close(cancel=True)
    kept.clear()
    assert list(tmp_path.iterdir()) == []


class Gate:
    """A disk on which nothing moves until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.asked = threading.Event()

    def __call__(self, write: bool, offset: int, transfer: Callable[[], int]) -> int:
        self.asked.set()
        assert self.open.wait(30)
        return transfer()


def some_bytes(size_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


@pytest.mark.parametrize("most", [4096, 50_001])
def test_short_counts_are_continued(on_disk, most):
    """Told counts: past the page cache the system itself stops at sectors only."""
    tier = on_disk(lambda write, offset, transfer: min(transfer(), most))
    for offset in (0, 123, BLOCK_BYTES - 70_000):
        sent = some_bytes(200_001, seed=offset)
        tier.write(offset, sent).wait()
        back = np.empty_like(sent)
        tier.read(offset, back).wait()
        assert np.array_equal(back, sent)
    assert tier.statistics.written_bytes == tier.statistics.read_bytes == 3 * 200_001


def test_a_fault_of_python_is_told_once_all_blocks_have_ended(tmp_path, monkeypatch):
    """Until then the array belongs to the transfer, and what comes after it goes on."""
    monkeypatch.setattr(file_tier_module, "native_library", lambda: None)
    transfer, begun, gate = python_file._system_io, threading.Event(), threading.Event()

    def failing(fd: int, write: bool, memory: memoryview, offset: int) -> int:
        if offset == 0:
            begun.wait()
            raise MemoryError("no memory")
        begun.set()
        gate.wait()
        return transfer(fd, write, memory, offset)

    with FileTier(tmp_path, 2 * BLOCK_BYTES) as tier:
        with monkeypatch.context() as broken:
            broken.setattr(python_file, "_system_io", failing)
            reading = tier.read(0, np.ones(2 * BLOCK_BYTES, dtype=np.uint8))
            threading.Timer(0.05, gate.set).start()
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                reading.wait()
            assert gate.is_set()
        sent, back = some_bytes(1000), np.empty(1000, dtype=np.uint8)
        tier.write(0, sent).wait()
        tier.read(0, back).wait()
        assert np.array_equal(back, sent)
    assert tier.closed


def test_interruptions_are_tried_again(on_disk):
    calls = []

    def interrupting(write: bool, offset: int, transfer: Callable[[], int]) -> int:
        calls.append(offset)
        if len(calls) % 3 and isinstance(tier._file, NativeFile):
            raise InterruptedError(errno.EINTR, "signal")  # Python itself never lets this through
        return transfer()

    tier = on_disk(interrupting)
    sent, back = some_bytes(100_000), np.empty(100_000, dtype=np.uint8)
    tier.write(7, sent).wait()
    tier.read(7, back).wait()
    assert np.array_equal(back, sent)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ENODEV])
@pytest.mark.parametrize("write", [True, False])
def test_a_fault_is_told_and_the_tier_goes_on(on_disk, tmp_path, write, code):
    bad = threading.Event()

    def failing(write_: bool, offset: int, transfer: Callable[[], int]) -> int:
        if bad.is_set() and write_ == write and offset >= BLOCK_BYTES:
            raise OSError(code, "no")
        return transfer()

    tier = on_disk(failing)
    array = some_bytes(2 * BLOCK_BYTES + 5)
    bad.set()
    asked = (tier.write if write else tier.read)(4096, array)
    for _ in range(2):
        with pytest.raises(OSError, match="failed") as caught:
            asked.wait()
        assert caught.value.errno == code
    assert asked.done()
    verb, advice = "writing" if write else "reading", file_tier_module._ADVICE.get(code, "name a")
    assert str(caught.value).startswith(
        f"[Errno {code}] {verb} 16.0 MiB at byte 4096 of the file tier in {tmp_path} failed: "
    )
    assert advice in str(caught.value)
    small = some_bytes(100)
    tier.write(0, small).wait() if write else tier.read(0, small).wait()
    bad.clear()
    tier.write(4096, array).wait()
    back = np.empty_like(array)
    tier.read(4096, back).wait()
    assert np.array_equal(back, array)


def test_a_disk_that_moves_nothing_is_faulty(on_disk):
    tier = on_disk(lambda write, offset, transfer: 0)
    for start in (tier.write, tier.read):
        for size in (1, BLOCK_BYTES):
            with pytest.raises(OSError, match="the disk is faulty"):
                start(0, some_bytes(size)).wait()
    assert tier.statistics.written_bytes == tier.statistics.read_bytes == 0


def test_a_slow_disk_is_slow_and_right(on_disk):
    def slow(write: bool, offset: int, transfer: Callable[[], int]) -> int:
        time.sleep(0.02)
        return transfer()

    tier = on_disk(slow, threads=4)
    sent = some_bytes(SIZE)
    begin_s = time.perf_counter()
    tier.write(0, sent).wait()
    assert time.perf_counter() - begin_s >= 0.02
    back = np.empty_like(sent)
    tier.read(0, back).wait()
    assert np.array_equal(back, sent)
    assert tier.statistics.write_s >= 0.02


def test_an_array_lives_until_its_transfer_is_done(on_disk):
    gate = Gate()
    tier = on_disk(gate)
    array = some_bytes(MIB)
    alive = weakref.ref(array)
    asked = tier.write(0, array)
    dropped = some_bytes(MIB, seed=1)
    dropped_alive = weakref.ref(dropped)
    tier.write(MIB, dropped)
    del array, dropped
    gc.collect()
    assert not asked.done()
    assert alive() is not None
    assert dropped_alive() is not None
    gate.open.set()
    asked.wait()
    deadline_s = time.monotonic() + 10
    back = np.empty(2 * MIB, dtype=np.uint8)
    while dropped_alive() is not None and time.monotonic() < deadline_s:
        tier.read(0, back).wait()  # what is done is noticed with the next request
        gc.collect()
    assert alive() is None
    assert dropped_alive() is None
    tier.read(0, back).wait()
    assert np.array_equal(back, np.concatenate([some_bytes(MIB), some_bytes(MIB, seed=1)]))


def test_a_waiter_hears_an_interrupt(on_disk):
    gate = Gate()
    tier = on_disk(gate)
    asked = tier.write(0, some_bytes(MIB))

    def interrupt() -> None:
        time.sleep(0.1)  # until the main thread waits; earlier would pass, too, and show nothing
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(threading.main_thread().ident or 0), ctypes.py_object(KeyboardInterrupt)
        )

    def wait() -> None:
        thread.start()
        asked.wait()

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        wait()
    thread.join()
    gate.open.set()
    asked.wait()


def test_closing_serves_what_was_asked_for(on_disk):
    gate = Gate()
    tier = on_disk(gate)
    transfers = [tier.write(0, some_bytes(SIZE)), tier.read(0, some_bytes(SIZE))]
    threading.Timer(0.05, gate.open.set).start()
    tier.close()
    for asked in transfers:
        assert asked.done()
        asked.wait()
    assert tier.statistics.written_bytes == tier.statistics.read_bytes == SIZE
    tier.close()
    assert tier.closed
    with pytest.raises(ValueError, match="the file tier is closed; it moves no more bytes"):
        tier.write(0, some_bytes(1))


def test_an_exception_gives_up_what_has_not_begun(on_disk):
    gate = Gate()
    tier = on_disk(gate, threads=1)
    transfers: list[Transfer] = []
    seen: list[int | None] = []

    def open_when_cancelled() -> None:
        with pytest.raises(OSError, match="the tier was closed before it was done") as caught:
            transfers[-1].wait()
        seen.append(caught.value.errno)
        gate.open.set()

    watcher = threading.Thread(target=open_when_cancelled)

    def fail_inside() -> None:
        with tier:
            transfers.extend(tier.write(0, some_bytes(SIZE)) for _ in range(3))
            assert gate.asked.wait(30)
            watcher.start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    watcher.join()
    assert seen == [errno.ECANCELED]
    assert all(asked.done() for asked in transfers)
    assert tier.statistics.written_bytes < SIZE


def test_a_tier_may_just_be_dropped(on_disk, monkeypatch, tmp_path):
    """Without closing, with requests in flight and nobody who waits for them."""
    on_disk(lambda write, offset, transfer: transfer())
    for _ in range(20):
        tier = FileTier(tmp_path, SIZE)
        for i in range(4):
            tier.write(i * BLOCK_BYTES + i, np.empty(BLOCK_BYTES - 100, dtype=np.uint8))
        del tier
    gc.collect()
    deadline_s = time.monotonic() + 10
    while threading.active_count() > 20 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert threading.active_count() <= 20


@pytest.mark.parametrize("sanitizers", ["address,undefined", *exhaustive("thread")])
def test_the_sources_pass_the_sanitizers(tmp_path, sanitizers):
    """Strict warnings are errors; addresses, leaks, undefined behaviour and races are watched."""
    program, files = tmp_path / "check", tmp_path / "files"
    files.mkdir()
    sources = [ROOT / "tests/kernels/file_tier_check.c", ROOT / "csrc/file_tier.c"]
    warn = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    sanitize = ["-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    command = [c_compiler(), "-std=c11", "-pthread", *warn, *sanitize, f"-I{ROOT / 'csrc'}"]
    built = subprocess.run([*command, "-o", program, *sources], capture_output=True, text=True)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"the compiler has no libraries for {sanitizers}")
    assert built.returncode == 0, built.stderr
    done = run([program, files])
    if "unexpected memory mapping" in done.stderr:  # of addresses that are more random than it can
        setarch = shutil.which("setarch")
        if setarch is None:
            pytest.skip("the thread sanitizer does not run under this system's random addresses")
        done = run([setarch, "-R", program, files])
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert list(files.iterdir()) == []


def run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
