"""Errors of torch that mean a lost rank: they become PeerLostError."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Parts of messages of torch.distributed, in lower case; it has no types for them.
_LOSS_SIGNS = (
    # gloo
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection timed out",
    "no route to host",
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "connectfullmesh failed",
    "operation timed out",
    # the store, where the ranks meet; gloo's wait, too
    "wait timeout",
    "connection was likely closed",
    "timed out after",
    "failed to connect/validate",
    "has timed out",
    # NCCL
    "ncclremoteerror",
    "remote process exited",
    "closed by remote peer",
    "collective operation timeout",
    "communicator was aborted",
)
_PLACE_IN_SOURCE = re.compile(r"^\[\S+:\d+\]\s*")
_TIMEOUT = re.compile(r"(?:timed out waiting|wait timeout after) (\d+)ms.*", re.IGNORECASE)
"""Timeouts of gloo for a message and of the store for a key."""
_CLOSED_AFTER_TIMEOUT = "application timeout caused pair closure"
"""Message of gloo for a connection on which a wait of this process has run out before."""
_ADVICE = re.compile(r"\. This is typically caused by.*$")


class PeerLostError(RuntimeError):
    """Another rank ended, or did not answer in time: not this rank's fault."""


@contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Turn torch's errors for a lost connection or a timeout within into PeerLostError.

    Args:
        what: is done, e.g. "waiting for 0SEND_ACT0.3 from rank 0".

    Raises:
        PeerLostError: says ``what``, and in a line what torch said.
    """
    try:
        yield
    except PeerLostError:
        raise
    except RuntimeError as error:
        reason = loss_in(error)
        if reason is None:
            raise
        raise PeerLostError(f"{what}: {reason}") from error


def loss_in(error: RuntimeError) -> str | None:
    """Return in one line why a peer is lost; None if an error of torch means something else."""
    for line in str(error).splitlines():
        if not any(sign in line.lower() for sign in _LOSS_SIGNS):
            continue
        if _CLOSED_AFTER_TIMEOUT in line.lower():
            return "timed out before, and closed the connection then"
        reason = _ADVICE.sub("", _PLACE_IN_SOURCE.sub("", line.strip()))
        return _TIMEOUT.sub(lambda match: f"timed out after {int(match[1]) / 1000:g} s", reason)
    return None
