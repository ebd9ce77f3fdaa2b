"""Places in the code of a rank at which faults strike: calls of functions that are wrapped here.

Every call of a wrapped function has a number in its rank. A run without a fault counts the calls
and the lines of Python that each executes; from these a fault is drawn: before a call, inside of
it, after one of its lines, or after it.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Moment = Literal["before", "inside", "after"]

KINDS: Mapping[str, Sequence[str]] = {
    "start": (
        "sppo.training.job._connected",
        "sppo.training.preflight.preflight",
        "sppo.training.trainer.build_state",
        "sppo.checkpoint.checkpoint.CheckpointManager.latest_valid",
    ),
    "collective": (
        "sppo.parallel.host_collectives.HostCollectives._run",
        "sppo.parallel.pipeline_p2p.PipelineLinks.send",
        "sppo.parallel.pipeline_p2p.PipelineLinks.receive",
        "sppo.parallel.pipeline_p2p.MessageInFlight.wait",
        "sppo.parallel.msp_exchange.MspExchange.from_owner",
        "sppo.parallel.msp_exchange.MspExchange.to_owner",
        "sppo.parallel.row_messages.RowMessage.gather",
        "sppo.parallel.row_messages.RowMessage.reduce",
        "sppo.parallel.row_messages.RowMessage.wait",
        "sppo.parallel.row_messages.RowBuckets.wait",
        "sppo.parallel.ulysses.UlyssesAllToAll.to_heads",
        "sppo.parallel.ulysses.UlyssesAllToAll.to_tokens",
    ),
    "copy": (
        "sppo.offload.tiers.Tier.send",
        "sppo.offload.tiers.Tier.fetch",
        "sppo.offload.disk.file_tier.FileTier._move",
        "sppo.offload.lane.MappedFileLane._copy",
    ),
    "compute": ("sppo.offload.block_store.BlockStore.get",),
    "save": (
        "sppo.training.run_checkpoints.RunCheckpoints.save",
        "sppo.checkpoint.checkpoint.CheckpointManager._write",
        "sppo.checkpoint.checkpoint.CheckpointManager._prune",
        "sppo.checkpoint.checkpoint.save_tensors",
        "sppo.checkpoint.checkpoint.write_manifest",
        "sppo.checkpoint.checkpoint.publish",
    ),
    "update": (
        "sppo.training.state.TrainingState.finish_gradients",
        "sppo.training.state.TrainingState.norm",
        "sppo.training.state.TrainingState.update",
        "sppo.optim.adamw.AdamW.step",
        "sppo.optim.host_adamw.HostAdamW.step",
    ),
    "record": (
        "sppo.training.records.step_records.StepRecords.record",
        "sppo.training.report.report",
    ),
}
"""Dotted names of the functions, as their callers look them up, by the kind of place."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a fault strikes."""

    rank: int
    function: str
    call: int
    """Number of the call in the rank, from 1."""
    moment: Moment
    line: int = 0
    """Number of the executed line inside of the call, from 1."""

    def __str__(self) -> str:
        where = f"{self.moment} line {self.line} of" if self.moment == "inside" else self.moment
        return f"{where} call {self.call} of {self.function} on rank {self.rank}"


def count_calls(directory: str) -> None:
    """Write the lines that each call executes to ``calls_RANK.json`` when a rank ends."""
    lines: dict[str, list[int]] = defaultdict(list)

    def counted(name: str, call: Callable[[], Any], _: tuple[Any, ...]) -> Any:
        if not lines:
            path = Path(directory, f"calls_{os.environ['RANK']}.json")
            atexit.register(lambda: path.write_text(json.dumps(lines)))
        begin = itertools.count()
        try:
            return _traced(call, lambda: next(begin))
        finally:
            lines[name].append(next(begin))

    for name in itertools.chain.from_iterable(KINDS.values()):
        _wrap(name, counted)


def strike_at(place: Mapping[str, Any], strike: Callable[[tuple[Any, ...]], None]) -> None:
    """Have a rank call ``strike`` with the arguments of a call, from that of a :class:`Place` on.

    Args:
        place: Fields of the :class:`Place`.
        strike: Function that does something at most once.
    """
    at, calls = Place(**place), itertools.count(1)

    def struck(_: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if os.environ.get("RANK") != str(at.rank) or next(calls) < at.call:
            return call()
        if at.moment == "before":
            strike(arguments)
        lines = itertools.count(1)
        found = (
            _traced(call, lambda: strike(arguments) if next(lines) == at.line else None)
            if at.moment == "inside"
            else call()
        )
        if at.moment == "after":
            strike(arguments)
        return found

    _wrap(at.function, struck)


def _traced(call: Callable[[], Any], on_line: Callable[[], object]) -> Any:
    """Return what ``call`` returns, with ``on_line`` before each line that it executes."""

    def trace(frame: Any, event: str, _: object) -> Any:
        if event == "line":
            on_line()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)


def _wrap(name: str, around: Callable[[str, Callable[[], Any], tuple[Any, ...]], Any]) -> None:
    """Replace a function by ``around``, which gets its name, a call of it, and the arguments."""
    owner, attribute = _owner(name)
    function = getattr(owner, attribute)

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        return around(name, functools.partial(function, *args, **options), args)

    setattr(owner, attribute, wrapped)


def _owner(name: str) -> tuple[Any, str]:
    """Return the module or class that has a function, and the name of the function there."""
    *path, attribute = name.split(".")
    for count in range(len(path), 0, -1):
        try:
            owner = importlib.import_module(".".join(path[:count]))
        except ModuleNotFoundError:
            continue
        for part in path[count:]:
            owner = getattr(owner, part)
        return owner, attribute
    raise ModuleNotFoundError(name)
