"""Rendezvous of the ranks of a job, with a check that versions and configurations are equal.

Versions and configurations are compared through the rendezvous store, before any process group
exists. The comparison needs no device and no collective, which might hang between two versions.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

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
_VERDICT_S = 5.0
"""Seconds that other ranks wait longer than rank 0, and that rank 0 waits for them to read its
verdict."""
_MOST_LINES = 15
_OTHER_PROGRAM = ("EADDRINUSE", "Ping failed")
"""Parts of error messages if another program uses the port: on the serving rank, on the others."""


def connect(
    environment: RankEnvironment,
    *,
    backend: Literal["gloo", "nccl"],
    timeout_s: float,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Join the default process group of torch.distributed as a rank of the job.

    The default group is not bound to a device: torch splits all other groups off a bound group,
    which needs every rank, while :class:`sppo.parallel.mesh.Mesh` makes groups of members only.

    Args:
        environment: Rank of this process, and the address of the rendezvous.
        backend: Back end of the default group.
        timeout_s: Longest time in seconds that a rank waits for others, here and in all operations
            of the group.
        facts: Values by name that must be equal on all ranks, such as the version of SPPO.

    Raises:
        ValueError: The port is in use, the master has no address, or facts differ. If facts differ,
            every rank raises the same error, with the ranks and both values of each fact.
        PeerLostError: Other ranks did not connect in time.
    """
    store = _connect_to_store(environment, timeout_s=timeout_s)
    rank, world_size = environment.rank, environment.world_size
    if facts is not None:
        _check_same_facts(store, facts, rank=rank, world_size=world_size, timeout_s=timeout_s)
    if backend == "gloo" and environment.is_one_machine:
        use_loopback()
    with _interface_named(environment), peer_errors("connecting to the other ranks"):
        dist.init_process_group(
            backend,
            store=store,
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


def flat_facts(values: Mapping[str, Any], *, prefix: str = "") -> dict[str, str]:
    """Return nested ``values`` as one fact per leaf, so that differences are reported by key.

    For example ``{"a.b": "1"}`` for ``{"a": {"b": 1}}``.
    """
    facts: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            facts |= flat_facts(value, prefix=f"{name}.")
        else:
            facts[name] = json.dumps(value)
    return facts


def difference_report(facts: Sequence[Mapping[str, str]]) -> str:
    """Return the error message for ranks with different facts; "" if all ranks have equal facts.

    Args:
        facts: Facts of every rank, in order of rank.
    """
    lines = [f"  {line}" for line in _differences(facts)]
    if not lines:
        return ""
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  and {len(lines) - _MOST_LINES} more"]
    return (
        "the ranks of a job must all run the same, and these do not:\n"
        + "\n".join(lines)
        + "\nstart every rank from the same installation with the same command and the same data"
    )


def _differences(facts: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield one line for each value that differs from the value on rank 0."""
    for name in dict.fromkeys(name for values in facts for name in values):
        expected = facts[0].get(name, "nothing")
        others: dict[str, list[str]] = {}
        for rank, values in enumerate(facts):
            value = values.get(name, "nothing")
            if value != expected:
                others.setdefault(value, []).append(str(rank))
        for value, ranks in others.items():
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
            yield f"{name}: {expected} on rank 0, {value} on {who}"


def _check_same_facts(
    store: Store, facts: Mapping[str, str], *, rank: int, world_size: int, timeout_s: float
) -> None:
    """Send facts to rank 0, which compares them; raise its verdict on every rank."""
    store = PrefixStore("sppo agreement", store)
    with peer_errors("telling rank 0 what this rank runs"):
        # Ranks that torchrun restarts find the keys of earlier attempts in its store.
        attempt = store.add(f"calls of rank {rank}", 1)
        keys = [f"call {attempt} rank {other}" for other in range(world_size)]
        store.set(keys[rank], json.dumps(dict(facts)))
    verdict_key = f"call {attempt} verdict"
    if rank == 0:
        verdict = _verdict(store, keys, timeout_s=timeout_s)
        store.set(verdict_key, json.dumps(verdict))
        if verdict["different"]:
            # The store may end with rank 0, so the others must read first.
            with suppress(PeerLostError), peer_errors("waiting for the others to read"):
                read_keys = [f"{key} has read" for key in keys[1:]]
                store.wait(read_keys, timedelta(seconds=_VERDICT_S))
    else:
        with peer_errors(f"waiting {timeout_s:g} s for rank 0 to compare what all ranks run"):
            store.wait([verdict_key], timedelta(seconds=timeout_s + _VERDICT_S))
            verdict = json.loads(store.get(verdict_key))
            store.set(f"{keys[rank]} has read", "")
    if verdict["missing"]:
        raise PeerLostError(verdict["missing"])
    if verdict["different"]:
        raise ValueError(verdict["different"])


def _verdict(store: Store, keys: Sequence[str], *, timeout_s: float) -> dict[str, str]:
    """Return the verdict of rank 0: empty texts if all ranks connected with equal facts."""
    deadline = time.monotonic() + timeout_s
    facts = []
    for rank, key in enumerate(keys):
        missing = f"rank {rank} did not come within {timeout_s:g} s"
        # A key that exists is found even if no time is left.
        left_s = max(0.01, deadline - time.monotonic())
        try:
            with peer_errors(missing):
                store.wait([key], timedelta(seconds=left_s))
        except PeerLostError:
            return {"missing": f"{missing} (parallel.timeout_s)", "different": ""}
        facts.append(json.loads(store.get(key)))
    return {"missing": "", "different": difference_report(facts)}


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
        reason = _refusal(host, port)
        if reason is not None:
            raise _nobody_listens(environment, reason) from None
        raise PeerLostError(
            f"rank {environment.rank} timed out after {timeout_s:g} s (parallel.timeout_s): {host} "
            f"port {port}, where the ranks are to meet, accepts connections and does not answer: "
            "if another program has it, set MASTER_PORT to a free one"
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
        raise _nobody_listens(environment, reason) from error


def _nobody_listens(environment: RankEnvironment, reason: str) -> PeerLostError:
    return PeerLostError(
        f"rank {environment.rank} cannot reach {environment.master_address} port "
        f"{environment.master_port}, where the ranks meet: is rank 0 running there, and is the "
        f"port open? ({reason})"
    )


def _refusal(host: str, port: int) -> str | None:
    """Return why no process listens on a port; None if a process does.

    torch on a busy machine may take longer than its timeout to report that no process listens.
    """
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
            # A client whose own port happens to be this port is connected to itself.
            alone = connection.getsockname() == connection.getpeername()
            return "connection refused" if alone else None
    except OSError as error:
        return str(error.strerror or error).lower()


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
