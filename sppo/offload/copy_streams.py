"""The two streams in which one rank copies between a CUDA device and its host memory, in pieces.

All offload stores of a rank share them: torch has 32 streams, and hands out the first ones again
after that (:mod:`sppo.parallel.stream_budget`). Sharing costs nothing, for a device has one copy
engine a direction, and cannot block: whatever a copy waits for was issued before it.

They also know whether the device still answers. After a failure on one of several ranks, compute
may wait for a message of a rank that waits for this one; whoever then waited for the device would
hide the failure.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sppo.units import MIB

PIECE_BYTES = 32 * MIB
"""Longest copy; longer ones are cut, so that other users of the copy engine get their turn."""
_ASK_EVERY_S = 0.001


def copy_in_pieces(target: Tensor, source: Tensor) -> None:
    """Copy between host and device in the current stream, cut to the longest copy.

    Args:
        target: contiguous, of as many bytes.
        source: contiguous.
    """
    into, data = (tensor.view(-1).view(torch.uint8) for tensor in (target, source))
    assert into.numel() == data.numel(), f"{data.numel()} bytes into {into.numel()}"
    for start in range(0, data.numel(), PIECE_BYTES):
        piece = slice(start, start + PIECE_BYTES)
        into[piece].copy_(data[piece], non_blocking=True)


class CopyStreams:
    """Streams for copies out of the device and back.

    Args:
        cuda: the runtime: ``torch.cuda``, or what tests put in its place.
        device: a CUDA device.
        give_up_s: seconds that :meth:`wait_for_device` waits; None: as long as it takes.
    """

    def __init__(self, cuda: Any, device: torch.device, *, give_up_s: float | None = None) -> None:
        self._cuda, self._device, self._give_up_s = cuda, device, give_up_s
        self.out, self.back = (cuda.Stream(device) for _ in range(2))
        self.given_up = False
        """Whether the device did not end its work in time: nothing may wait for it any more."""

    def wait_for_device(self) -> bool:
        """Return True when the device has done all work, False if it does not in time, or fails."""
        if self.given_up:
            return False
        streams = (self._cuda.current_stream(self._device), self.out, self.back)
        try:
            if self._give_up_s is None:
                self._cuda.synchronize(self._device)
                return True
            done = done_in_time(self._cuda, self._device, streams, still_s=self._give_up_s)
        except RuntimeError:  # of a device that has failed; whoever gives up has a reason already
            done = False
        self.given_up = not done
        return done

    def give_up(self) -> None:
        """Note that work which a thread of the host does has not ended in time."""
        self.given_up = True

    @property
    def give_up_s(self) -> float | None:
        """Seconds to wait for work of host threads, too."""
        return 0.0 if self.given_up else self._give_up_s


def done_in_time(
    cuda: Any,
    device: torch.device,
    streams: Sequence[Any],
    *,
    still_s: float,
    marks: Sequence[Any] = (),
) -> bool:
    """Return whether a device does what was issued to ``streams`` without standing still too long.

    A thread asks: where a stream waits for another rank and is full, even recording an event may
    not return.

    Args:
        cuda: the runtime.
        device: of the streams.
        streams: to look at.
        still_s: longest time in seconds in which the device may come to none of the marks.
        marks: events within the streams, in the order in which the device comes to them.

    Raises:
        RuntimeError: the device has failed.
    """
    question = _Question(cuda, device, streams, marks)
    threading.Thread(target=question.ask, name="sppo device", daemon=True).start()
    while not question.answered.wait(max(0.0, question.moved_s + still_s - time.monotonic())):
        if time.monotonic() >= question.moved_s + still_s:
            question.given_up = True
            return False
    if question.error is not None:
        raise question.error
    return True


class _Question:
    """Asks a device, from a thread, whether it has done what was issued to some streams."""

    def __init__(
        self, cuda: Any, device: torch.device, streams: Sequence[Any], marks: Sequence[Any]
    ) -> None:
        self._cuda, self._device, self._streams = cuda, device, streams
        self._left = deque(marks)
        self.answered = threading.Event()
        self.error: Exception | None = None
        self.moved_s = time.monotonic()
        """When the device last came to a mark, as far as has been seen."""
        self.given_up = False
        """Whether nobody waits for the answer any more."""

    def ask(self) -> None:
        try:
            self._cuda.set_device(self._device)  # a thread begins on the machine's first device
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
