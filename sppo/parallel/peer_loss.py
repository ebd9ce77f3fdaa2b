"""Errors of communication that mean: another rank is gone, or does not come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Parts of what torch.distributed says through gloo, NCCL and the store; there are no types for it.
_SIGNS = (
    # gloo
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "Wait timeout",
    "Operation timed out",
    "connection timed out",
    "Gloo connectFullMesh failed",
    # the store, where the ranks meet
    "wait timeout after",
    "Connection was likely closed",
    "timed out after",
    "clients joined",
    "failed to connect/validate",
    "has timed out",
    # NCCL
    "ncclRemoteError",
    "ncclSystemError",
    "collective operation timeout",
    "NCCL communicator was aborted",
)


class PeerLostError(RuntimeError):
    """Another rank ended, or did not answer in time: not this rank's fault."""


@contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Turn torch's errors for a lost connection or a timeout within into PeerLostError.

    Args:
        what: was done, e.g. "waiting for 0SEND_ACT0.3 from rank 0".

    Raises:
        PeerLostError: says ``what``, and on a second line what torch said.
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
    """Why a peer is lost according to an error of torch, in a line; None: it is another error."""
    text = str(error)
    if not any(sign in text for sign in _SIGNS):
        return None
    return " ".join(text.splitlines()[0].split())
