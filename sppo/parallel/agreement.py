"""Ranks of one job must be of one version and one configuration; those that are not, say so.

Facts go through the store where the ranks meet, before anything else is built on them: it needs no
device, and no collective that could hang between two versions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from sppo.parallel.peer_loss import PeerLostError, peer_errors

_TELL_S = 5.0
"""What the others wait longer than rank 0, which tells them when one did not come."""
_MOST_LINES = 15


def check_same_on_all_ranks(facts: Mapping[str, str], *, timeout_s: float) -> None:
    """Refuse to go on unless all ranks of the default group have the same facts.

    Every rank calls it.

    Args:
        facts: by name, e.g. the version of SPPO or a digest of the configuration.
        timeout_s: how long to wait for the others.

    Raises:
        ValueError: the same on every rank: which ranks differ in which fact, with both values.
        PeerLostError: others did not come in time.
    """
    check_same_in_store(
        dist.distributed_c10d._get_default_store(),
        facts,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        timeout_s=timeout_s,
    )


def check_same_in_store(
    store: Store, facts: Mapping[str, str], *, rank: int, world_size: int, timeout_s: float
) -> None:
    """Check facts as :func:`check_same_on_all_ranks` does, for ranks that have only ``store``."""
    place = PrefixStore("sppo agreement", store)
    with peer_errors("telling rank 0 what this rank runs"):
        call = place.add(f"calls of rank {rank}", 1)
        place.set(_key(call, rank), json.dumps(dict(facts)))
    verdict_key = f"call {call} verdict"
    if rank == 0:
        verdict = _verdict(place, call=call, world_size=world_size, timeout_s=timeout_s)
        place.set(verdict_key, json.dumps(verdict))
        if verdict["different"]:
            _wait_for_readers(place, call=call, world_size=world_size)
    else:
        with peer_errors(f"waiting {timeout_s:g} s for rank 0 to compare what all ranks run"):
            place.wait([verdict_key], timedelta(seconds=timeout_s + _TELL_S))
            verdict = json.loads(place.get(verdict_key))
            place.set(f"{_key(call, rank)} has read", "")
    if verdict["missing"]:
        raise PeerLostError(verdict["missing"])
    if verdict["different"]:
        raise ValueError(verdict["different"])


def flat_facts(values: Mapping[str, Any], *, prefix: str = "") -> dict[str, str]:
    """Facts with one name for each value of nested ``values``, so that a difference names its key.

    E.g. ``{"a.b": "1"}`` of ``{"a": {"b": 1}}``.
    """
    facts: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            facts |= flat_facts(value, prefix=f"{name}.")
        else:
            facts[name] = json.dumps(value)
    return facts


def differences(facts: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """What ranks have that rank 0 has not, a line for each other value; ``facts`` are by rank."""
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


def difference_report(facts: Sequence[Mapping[str, str]]) -> str:
    """Return what to tell users of ranks that differ, "" if none does; ``facts`` are by rank."""
    lines = [f"  {line}" for line in differences(facts)]
    if not lines:
        return ""
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  and {len(lines) - _MOST_LINES} more"]
    return (
        "the ranks of a job must all run the same, and these do not:\n"
        + "\n".join(lines)
        + "\nstart every rank from the same installation with the same command and the same data"
    )


def _key(call: int, rank: int) -> str:
    return f"call {call} rank {rank}"


def _wait_for_readers(store: Store, *, call: int, world_size: int) -> None:
    """Rank 0 may serve the store, which ends with it: give the others time to read why."""
    with suppress(PeerLostError), peer_errors("waiting for the others to read"):
        keys = [f"{_key(call, rank)} has read" for rank in range(1, world_size)]
        store.wait(keys, timedelta(seconds=_TELL_S))


def _verdict(store: Store, *, call: int, world_size: int, timeout_s: float) -> dict[str, str]:
    """What rank 0 tells all: empty texts where everybody came and agrees."""
    deadline = time.monotonic() + timeout_s
    facts = []
    for rank in range(world_size):
        # A key that is there is found even when no time is left.
        left_s = max(0.01, deadline - time.monotonic())
        try:
            with peer_errors(f"rank {rank} did not come within {timeout_s:g} s"):
                store.wait([_key(call, rank)], timedelta(seconds=left_s))
        except PeerLostError:
            missing = f"rank {rank} did not come within {timeout_s:g} s (parallel.timeout_s)"
            return {"missing": missing, "different": ""}
        facts.append(json.loads(store.get(_key(call, rank))))
    return {"missing": "", "different": difference_report(facts)}
