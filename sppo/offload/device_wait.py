"""Waits for a CUDA device that end if the device stops making progress.

After a failure on one of several ranks, compute may wait for a message of a rank that waits for
this one; waiting for the device without a timeout would then hide the failure.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

_ASK_EVERY_S = 0.001


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
    left, answered, given_up = deque(marks), threading.Event(), threading.Event()
    moved_s, failures = [time.monotonic()], list[Exception]()

    def ask() -> None:
        try:
            cuda.set_device(device)  # a new thread starts on the first device
            for stream in streams:
                event = cuda.Event()
                event.record(stream)
                left.append(event)
            while left and not given_up.is_set():
                if left[0].query():
                    left.popleft()
                    moved_s[0] = time.monotonic()
                else:
                    time.sleep(_ASK_EVERY_S)
        except Exception as error:
            failures.append(error)
        answered.set()

    threading.Thread(target=ask, name="sppo device", daemon=True).start()
    while not answered.wait(max(0.0, moved_s[0] + stall_timeout_s - time.monotonic())):
        if time.monotonic() >= moved_s[0] + stall_timeout_s:
            given_up.set()
            return False
    if failures:
        raise failures[0]
    return True
