"""Copies between a device and the host's optimizer: gradients down, weights up.

Both directions run on their own, in the order they were asked for, while the host goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sppo.offload.copy_streams import CopyStreams
from sppo.offload.cuda_queues import CudaQueues

_cuda: Any = torch.cuda  # parts of it have no types

Copy = tuple[Tensor, Tensor]
"""(target, source), of one shape and dtype."""


class Done(Protocol):
    """The end of some copies."""

    def wait(self) -> None:
        """Block the host until they are done."""
        ...


class Transfers(Protocol):
    """The copies of one device."""

    def memory(self, size_bytes: int) -> Tensor:
        """Host memory that copies are fast to and from, uint8; once.

        Raises:
            MemoryError: there is not that much, or it may not be locked.
        """
        ...

    def down(self, copies: Sequence[Copy]) -> Done:
        """Start to copy from the device what compute issued so far has written."""
        ...

    def up(self, copies: Sequence[Copy]) -> Done:
        """Start to copy to the device, after compute issued so far has read what was there."""
        ...

    def finish(self) -> None:
        """Compute issued from now on finds everything that went up."""
        ...


class CudaTransfers:
    """:class:`Transfers` of a CUDA device: a stream per direction, page-locked host memory.

    Args:
        device: whose gradients and weights are copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        streams = CopyStreams(_cuda, device)
        self._queues = CudaQueues(device, streams=streams)  # holds the host memory, locked
        self._down, self._up = streams.out, streams.back
        self._last: Any = None

    def memory(self, size_bytes: int) -> Tensor:
        """Return page-locked host memory of that size, uint8, in one block."""
        return self._queues.host_memory(size_bytes)

    def down(self, copies: Sequence[Copy]) -> Done:
        """Start to copy from the device, behind compute issued so far, on a stream of its own."""
        return self._copy(self._down, copies)

    def up(self, copies: Sequence[Copy]) -> Done:
        """Start to copy to the device, behind compute issued so far, on a stream of its own."""
        self._last = self._copy(self._up, copies)
        return _StreamDone(self._last.event)

    def finish(self) -> None:
        """Let compute issued from now on wait for the last copy up."""
        if self._last is not None:
            _cuda.current_stream(self._device).wait_event(self._last.event)

    def _copy(self, stream: Any, copies: Sequence[Copy]) -> _StreamDone:
        stream.wait_stream(_cuda.current_stream(self._device))
        with torch.no_grad(), _cuda.stream(stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            event = _cuda.Event()
            event.record(stream)
        return _StreamDone(event)


class _StreamDone:
    """A point in a stream."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        """Return when the device has reached this point of its stream."""
        self.event.synchronize()
