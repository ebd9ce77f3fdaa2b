"""Conversion of torch's errors for lost ranks into PeerLostError."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Parts of error messages in lower case; torch.distributed has no exception types for these errors.
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
    # the rendezvous store, and gloo's wait
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
"""Timeout messages of gloo for a message, and of the store for a key."""
_CLOSED_AFTER_TIMEOUT = "application timeout caused pair closure"
"""Error of gloo for a connection on which an earlier wait of this process timed out."""
_ADVICE = re.compile(r"\. This is typically caused by.*$")

LATE = ": another rank hangs, or needs longer than parallel.timeout_s, which can be raised"
"""What a timeout means, after its seconds."""


class PeerLostError(RuntimeError):
    """Another rank ended or did not answer in time; this rank did not fail by itself."""


@contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Convert torch's errors for lost connections and timeouts in the context to PeerLostError.

    Args:
        what: Description of the operation, such as "waiting for 0SEND_ACT0.3 from rank 0".

    Raises:
        PeerLostError: A peer was lost; the message has ``what`` and torch's reason in one line.
    """
    try:
        yield
    except PeerLostError:
        raise
    except RuntimeError as error:
        reason = loss_in(error)
        if reason is None:
            raise
        advice = LATE if reason.startswith("timed out after") else ""
        raise PeerLostError(f"{what}: {reason}{advice}") from error


def loss_in(error: RuntimeError) -> str | None:
    """Return in one line why a peer is lost; None if torch's ``error`` has another meaning."""
    for line in str(error).splitlines():
        if not any(sign in line.lower() for sign in _LOSS_SIGNS):
            continue
        if _CLOSED_AFTER_TIMEOUT in line.lower():
            return "timed out before, and closed the connection then"
        reason = _ADVICE.sub("", _PLACE_IN_SOURCE.sub("", line.strip()))
        return _TIMEOUT.sub(lambda match: f"timed out after {int(match[1]) / 1000:g} s", reason)
    return None
