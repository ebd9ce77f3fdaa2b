"""Rendezvous of the ranks of a job, and what a rank says if others do not come."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from sppo.parallel.job.environment import RankEnvironment
from sppo.parallel.job.peer_errors import PeerLostError, loss_in, peer_errors
from sppo.parallel.job.timed_call import call_in_time
from sppo.quoting import quoted

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACKS = ("lo", "lo0")
_CONNECT_S = 5.0
"""Seconds beyond the timeout in which torch may itself report that no process listens."""
_OTHER_PROGRAM = ("EADDRINUSE", "Ping failed")
"""Parts of error messages if another program uses the port: on the serving rank, on the others."""


def connect(environment: RankEnvironment, *, timeout_s: float) -> None:
    """Join the default process group of torch.distributed, over gloo, as a rank of the job.

    The default group is not bound to a device: torch splits all other groups off a bound group,
    which needs every rank, while :class:`sppo.parallel.mesh.Mesh` makes groups of members only.

    Args:
        environment: Rank of this process, and the address of the rendezvous.
        timeout_s: Longest time in seconds that a rank waits for others, here and in all operations
            of the group.

    Raises:
        ValueError: The port is in use, or the master has no address.
        PeerLostError: Other ranks did not connect in time.
    """
    rank, world_size = environment.rank, environment.world_size
    # The store of torchrun keeps the keys of ranks that it has started before.
    start = f"sppo start {environment.restarts} of {world_size} ranks"
    store = PrefixStore(start, _connect_to_store(environment, timeout_s=timeout_s))
    call = _wait_for_all(store, rank=rank, world_size=world_size, timeout_s=timeout_s)
    if environment.is_one_machine:
        use_loopback()
    with _interface_named(environment), peer_errors("connecting to the other ranks"):
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"call {call}", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )


@contextmanager
def _interface_named(environment: RankEnvironment) -> Iterator[None]:
    """Add to errors between machines the variable with the network interface of gloo.

    Without it gloo takes the interface of the machine's name, which may be its own loopback.
    """
    try:
        yield
    except PeerLostError as error:
        if environment.is_one_machine:
            raise
        given = os.environ.get(_GLOO_INTERFACE)
        advice = f"is {quoted(given)}" if given else "is not set"
        raise PeerLostError(
            f"{error}; {_GLOO_INTERFACE} {advice}: set it to the network interface by which the "
            "machines reach each other, e.g. eth0"
        ) from error


def disconnect() -> None:
    """Destroy all process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _wait_for_all(store: Store, *, rank: int, world_size: int, timeout_s: float) -> int:
    """Wait until every rank has reached the store, and return how often they have, this included.

    Raises:
        PeerLostError: Some ranks have not come in time; the error names them.
    """
    with peer_errors("telling the other ranks that this rank is there"):
        call = store.add(f"calls of rank {rank}", 1)
        keys = [f"call {call} rank {other}" for other in range(world_size)]
        store.set(keys[rank], "")
    try:
        with peer_errors("waiting for the other ranks"):
            store.wait(keys, timedelta(seconds=timeout_s))
    except PeerLostError:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        raise PeerLostError(
            f"{who} did not come within {timeout_s:g} s (parallel.timeout_s)"
        ) from None
    return call


def _connect_to_store(environment: RankEnvironment, *, timeout_s: float) -> TCPStore:
    """Connect to the rendezvous store, which the launcher or rank 0 serves."""
    host, port = environment.master_address, environment.master_port
    serves = environment.rank == 0 and not environment.store_is_hosted
    _check_host(host, port=port)
    try:
        # torch limits the time to connect, but not the time until the server answers.
        return call_in_time(
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
            f"port {port}, where the ranks are to meet, does not answer: is rank 0 running there? "
            "If another program has the port, set MASTER_PORT to a free one"
        ) from None
    except RuntimeError as error:
        if any(sign in str(error) for sign in _OTHER_PROGRAM):
            raise ValueError(
                f"port {port} on {host}, where the ranks are to meet, is in use by another "
                "program: set MASTER_PORT to a free one"
            ) from error
        reason = loss_in(error)
        if reason is None:
            raise
        raise PeerLostError(
            f"rank {environment.rank} cannot reach {host} port {port}, where the ranks meet: is "
            f"rank 0 running there, and is the port open? ({reason})"
        ) from error


def _check_host(host: str, *, port: int) -> None:
    """Raise ValueError if a host has no address; torch would retry until the timeout."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"the host {quoted(host)}, where the ranks are to meet, has no address "
            f"({error.strerror}): set MASTER_ADDR to the host of rank 0"
        ) from None


def use_loopback() -> None:
    """Make gloo use the loopback interface, because the machine's name may have no address."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in _LOOPBACKS if name in names), None)
    if loopback is not None:
        os.environ.setdefault(_GLOO_INTERFACE, loopback)
