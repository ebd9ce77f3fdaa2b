"""Streams of one rank for copies between a CUDA device and host memory, one per direction.

All offload stores of a rank share the two streams, because torch has a pool of 32 streams and then
reuses them (:mod:`sppo.parallel.stream_budget`). Sharing costs nothing, since a device has one copy
engine per direction, and cannot deadlock, since a copy waits only for work issued before it.

The streams also tell whether the device still answers. After a failure on one of several ranks,
compute may wait for a message of a rank that waits for this one; waiting for the device without a
timeout would then hide the failure.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sppo.offload.page_lock import PIECE_BYTES, spans

_ASK_EVERY_S = 0.001


def copy_in_pieces(target: Tensor, source: Tensor, *, host: Tensor) -> None:
    """Copy between host and device in the current stream, in pieces of :data:`PIECE_BYTES`.

    Args:
        target: Contiguous tensor with as many bytes as ``source``.
        source: Contiguous tensor.
        host: The one of both in host memory, by whose addresses the copy is cut.
    """
    into, data = (tensor.view(-1).view(torch.uint8) for tensor in (target, source))
    assert into.numel() == data.numel(), f"{data.numel()} bytes into {into.numel()}"
    for begin, end in spans(host, most_bytes=PIECE_BYTES):
        into[begin:end].copy_(data[begin:end], non_blocking=True)


class CopyStreams:
    """Streams for copies out of the device and back.

    Args:
        cuda: CUDA runtime: ``torch.cuda``, or a replacement in tests.
        device: CUDA device.
        failed_step_timeout_s: Longest wait of :meth:`wait_for_device` in seconds; None for no
            limit.
    """

    def __init__(
        self, cuda: Any, device: torch.device, *, failed_step_timeout_s: float | None = None
    ) -> None:
        self._cuda, self._device, self._failed_step_timeout_s = cuda, device, failed_step_timeout_s
        self.out, self.back = (cuda.Stream(device) for _ in range(2))
        self.given_up = False
        """True if the device did not finish in time or failed: nothing may wait for it any more."""

    def wait_for_device(self) -> bool:
        """Wait for all work of the device; return False if it fails or does not finish in time."""
        if self.given_up:
            return False
        streams = (self._cuda.current_stream(self._device), self.out, self.back)
        try:
            if self._failed_step_timeout_s is None:
                self._cuda.synchronize(self._device)
                return True
            done = wait_with_timeout(
                self._cuda, self._device, streams, stall_timeout_s=self._failed_step_timeout_s
            )
        except RuntimeError:  # the device failed; the caller already reports another error
            done = False
        self.given_up = not done
        return done

    def give_up(self) -> None:
        """Record that work of a host thread did not end in time."""
        self.given_up = True

    @property
    def host_thread_timeout_s(self) -> float | None:
        """Longest wait in seconds for host threads; 0 after giving up, None for no limit."""
        return 0.0 if self.given_up else self._failed_step_timeout_s


def wait_with_timeout(
    cuda: Any,
    device: torch.device,
    streams: Sequence[Any],
    *,
    stall_timeout_s: float,
    marks: Sequence[Any] = (),
) -> bool:
    """Wait for the work issued to ``streams``; return False if the device stops making progress.

    A thread queries the device, because even recording an event may block if a stream waits for
    another rank and its queue is full.

    Args:
        cuda: CUDA runtime.
        device: Device of the streams.
        streams: Streams to wait for.
        stall_timeout_s: Longest time in seconds without progress, that is, without a mark being
            reached.
        marks: Events in the streams, in the order in which the device reaches them.

    Returns:
        Whether the device has done all work.

    Raises:
        RuntimeError: The device failed.
    """
    question = _Question(cuda, device, streams, marks)
    threading.Thread(target=question.ask, name="sppo device", daemon=True).start()
    while not question.answered.wait(
        max(0.0, question.moved_s + stall_timeout_s - time.monotonic())
    ):
        if time.monotonic() >= question.moved_s + stall_timeout_s:
            question.given_up = True
            return False
    if question.error is not None:
        raise question.error
    return True


class _Question:
    """Query, run in a thread, whether a device has done the work issued to some streams."""

    def __init__(
        self, cuda: Any, device: torch.device, streams: Sequence[Any], marks: Sequence[Any]
    ) -> None:
        self._cuda, self._device, self._streams = cuda, device, streams
        self._left = deque(marks)
        self.answered = threading.Event()
        self.error: Exception | None = None
        self.moved_s = time.monotonic()
        """Time at which the device was last seen to have reached a mark, by ``time.monotonic``."""
        self.given_up = False
        """True if the caller has stopped waiting for the answer."""

    def ask(self) -> None:
        try:
            self._cuda.set_device(self._device)  # a new thread starts on the first device
            for stream in self._streams:
                event = self._cuda.Event()
                event.record(stream)
                self._left.append(event)
            while self._left and not self.given_up:
                if self._left[0].query():
                    self._left.popleft()
                    self.moved_s = time.monotonic()
                else:
                    time.sleep(_ASK_EVERY_S)
        except Exception as error:
            self.error = error
        self.answered.set()
