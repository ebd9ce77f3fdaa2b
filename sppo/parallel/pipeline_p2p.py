"""Messages between neighbouring pipeline ranks, one communicator for each direction of each edge.

Messages are asynchronous and overlap compute on both ends. The receiver waits where the tensor is
used. The sender keeps a reference until the tensor has been sent, and waits at the end of the step
or when too many messages are in flight. With NCCL the stream waits, not the host.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.cost.memory.messages import MOST_SENDS
from sppo.parallel.job.peer_errors import peer_errors
from sppo.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class MessageInFlight:
    """Send or receive of ``tensor`` that was started; errors say ``what``."""

    tensor: Tensor
    work: Any
    what: str

    def wait(self) -> Tensor:
        """Wait until the tensor has been sent or received, and return it."""
        with peer_errors(self.what):
            self.work.wait()
        return self.tensor


class PipelineLinks:
    """Point-to-point messages between the positions of a pipeline.

    Args:
        mesh: Mesh of all ranks, connected.
        device: Device of the tensors.
    """

    def __init__(self, mesh: Mesh, *, device: torch.device) -> None:
        self._ranks, self._device = mesh.pipeline_ranks, device
        self._groups, self._here = mesh.groups.edges, mesh.at.pipeline
        self._far = mesh.groups.pipeline
        self._under_way: dict[int, deque[MessageInFlight]] = {}
        with peer_errors("sending first messages to the neighbours"):
            self._warm_up()

    def send(self, tensor: Tensor, *, receiver: int, what: str) -> None:
        """Start to send a tensor, after waiting for old messages if too many are in flight.

        The tensor must not change afterwards; errors name it ``what``. Gloo reports that a message
        has been sent only if it is waited for. Waiting cannot deadlock: a program is proven to end
        even if every send waits for its receive (:mod:`sppo.schedule.checks`).
        """
        under_way = self._under_way.setdefault(receiver, deque())
        while under_way and under_way[0].work.is_completed():
            under_way.popleft()
        while len(under_way) >= MOST_SENDS:
            under_way.popleft().wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._ranks[receiver], group=self._group(self._here, receiver))
        under_way.append(MessageInFlight(tensor, work, f"sending {what}"))

    def receive(
        self, shape: tuple[int, ...], *, dtype: torch.dtype, sender: int, what: str
    ) -> MessageInFlight:
        """Post the receive of a tensor; messages of an edge arrive in the order of their sends."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        work = dist.irecv(tensor, self._ranks[sender], group=self._group(sender, self._here))
        return MessageInFlight(tensor, work, f"waiting for {what}")

    def wait_all(self) -> None:
        """Wait until all messages of this rank have been sent."""
        for under_way in self._under_way.values():
            while under_way:
                under_way.popleft().wait()

    def _group(self, sender: int, receiver: int) -> ProcessGroup:
        group = self._groups.get((sender, receiver), self._far)
        assert group is not None, f"{sender} to {receiver}: only where units are cut"
        return group

    def _warm_up(self) -> None:
        """Send a small message over every edge, to connect all edges before anything is timed."""
        for edge in self._groups:
            sender, receiver = edge
            what = "a first message"
            if self._here == sender:
                self.send(torch.zeros(1, device=self._device), receiver=receiver, what=what)
            else:
                self.receive((1,), dtype=torch.float32, sender=sender, what=what).wait()
        self.wait_all()
