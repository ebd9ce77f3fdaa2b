"""Bring the ranks of a job together, or say clearly why they do not come together."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Thread
from typing import Literal, TypeVar, cast

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from sppo.parallel.agreement import check_same_in_store
from sppo.parallel.environment import RankEnvironment
from sppo.parallel.peer_loss import PeerLostError, loss_in, peer_errors
from sppo.quoting import quoted

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACKS = ("lo", "lo0")
_OPEN_FILES = 64
_CONNECTIONS_PER_RANK = 6
"""Measured with two and four ranks: 61 to 73 open files in all, 19 to 24 of them connections."""
_CONNECT_S = 5.0
"""torch gives up by itself where nobody listens, and says why; it gets this much longer to."""
_OTHER_PROGRAM = ("EADDRINUSE", "Ping failed")
"""What torch says where another program has the port: to the rank that serves, to the others."""

T = TypeVar("T")


def connect(
    environment: RankEnvironment,
    *,
    backend: Literal["gloo", "nccl"],
    timeout_s: float,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Make this process a rank of its job: the default group of torch.distributed.

    That group is never bound to a device: of one that is, torch splits all others off, in which
    every rank must take part, and :class:`sppo.parallel.mesh.Mesh` makes groups of members alone.

    Args:
        environment: the place of this process.
        backend: of the default group.
        timeout_s: how long a rank waits for others, here and in everything the group does.
        facts: what all ranks must agree on before they connect, see
            :func:`sppo.parallel.agreement.check_same_on_all_ranks`.

    Raises:
        ValueError: the port is in use, the master has no address, or facts differ.
        PeerLostError: others did not come in time.
    """
    store = _store(environment, timeout_s=timeout_s)
    rank, world_size = environment.rank, environment.world_size
    if facts is not None:
        check_same_in_store(store, facts, rank=rank, world_size=world_size, timeout_s=timeout_s)
    if backend == "gloo" and environment.is_one_machine:
        _use_loopback()
    with peer_errors("connecting to the other ranks"):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )


def allow_connections(num_ranks: int) -> None:
    """Let this process open as many files as the system lets it, and refuse too few.

    Args:
        num_ranks: of the job.

    Raises:
        MemoryError: the hard limit is below what a rank opens.
    """
    needed = _OPEN_FILES + _CONNECTIONS_PER_RANK * num_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = hard if hard != unlimited else max(soft, 2 * needed)
    if soft not in (most, unlimited):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if soft != unlimited and most < needed:
        raise MemoryError(
            f"a rank of {num_ranks} opens about {needed} files and connections, and this process "
            f"may open {most}: raise that limit (ulimit -n)"
        )


def disconnect() -> None:
    """Leave all groups; nothing where this process is in none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(environment: RankEnvironment, *, timeout_s: float) -> TCPStore:
    """The place where the ranks meet, served by the launcher or by rank 0."""
    host, port = environment.master_address, environment.master_port
    serves = environment.rank == 0 and not environment.store_is_hosted
    _check_host(host, port=port)
    in_use = (
        f"port {port} on {host}, where the ranks are to meet, is in use by another program: set "
        "MASTER_PORT to a free one"
    )
    try:
        return _in_time(
            lambda: TCPStore(
                host,
                port,
                environment.world_size,
                serves,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            ),
            limit_s=timeout_s + _CONNECT_S,
        )
    except TimeoutError:
        raise PeerLostError(
            f"rank {environment.rank} timed out after {timeout_s:g} s (parallel.timeout_s): {host} "
            f"port {port}, where the ranks are to meet, accepts connections and does not answer: "
            "if another program has it, set MASTER_PORT to a free one"
        ) from None
    except RuntimeError as error:
        if any(sign in str(error) for sign in _OTHER_PROGRAM):
            raise ValueError(in_use) from error
        reason = loss_in(error)
        if reason is None:
            raise
        raise PeerLostError(
            f"rank {environment.rank} cannot reach {host} port {port}, where the ranks meet: is "
            f"rank 0 running there, and is the port open? ({reason})"
        ) from error


def _in_time(make: Callable[[], T], *, limit_s: float) -> T:
    """Return what `make` returns; it goes on in vain in a thread if that takes too long.

    torch limits the time to connect, but not the time until what is there answers.

    Raises:
        TimeoutError: it took longer than `limit_s` seconds.
    """
    outcomes: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def attempt() -> None:
        try:
            outcomes.put((make(), None))
        except Exception as error:
            outcomes.put((None, error))

    Thread(target=attempt, name="connect", daemon=True).start()
    try:
        made, error = outcomes.get(timeout=min(limit_s, TIMEOUT_MAX))
    except Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return cast(T, made)


def _check_host(host: str, *, port: int) -> None:
    """Torch would try until the timeout."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"the host {quoted(host)}, where the ranks are to meet, has no address "
            f"({error.strerror}): set MASTER_ADDR to the host of rank 0"
        ) from None


def _use_loopback() -> None:
    """Ranks on one machine need no network, and the name of a machine may lead nowhere."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in _LOOPBACKS if name in names), None)
    if loopback is not None:
        os.environ.setdefault(_GLOO_INTERFACE, loopback)
