"""Checkpoint of another run from which a run starts (section ``start`` of the run file)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sppo.checkpoint.files import (
    BEST,
    CHECKPOINTS_DIRECTORY,
    best_checkpoint,
    list_checkpoints,
)
from sppo.checkpoint.manifest import MANIFEST_FILE, find_absence
from sppo.checkpoint.newest import Checkpoint, InvalidCheckpointError, find_checkpoint
from sppo.config import RunConfig
from sppo.config.json_file import read_json
from sppo.config.run import DataConfig
from sppo.config.start_model import CONFIG_FILE
from sppo.cost.trainable import Trainable, is_factor, trainable_of_run, trainable_of_sections
from sppo.data.run_tokens import check_same_vocabulary
from sppo.data.tokens import open_tokens
from sppo.quoting import quoted

_ONLY_PLACES = ("tokens", "eval_tokens")
"""Keys of the section ``data`` that do not say in which order it is read."""


def check_start(run: RunConfig) -> None:
    """Raise ValueError if the checkpoint that `run` starts from is not there; verifies no file.

    A run that has checkpoints of its own goes on from these: nothing is checked.
    """
    if run.start is not None and not has_started(run):
        _path(run)
        file = Path(run.start.from_run) / CONFIG_FILE
        if file.is_file():  # else that run's configuration is gone by now
            theirs = trainable_of_sections(read_json(file))
            _check_adapter(run, theirs)
            _check_moments(run, theirs)


def _check_adapter(run: RunConfig, theirs: Trainable) -> None:
    """Raise ValueError unless `run` goes on with the adapter of the run it starts from, or merges.

    A run that goes on trains all that the other has trained, so that the weights beside the
    adapter are those of the other's base.
    """
    assert run.start is not None, "the run starts from another"
    if run.adapter is None or theirs.adapter is None:
        return
    ours, from_run = trainable_of_run(run), run.start.from_run
    before, now = (one.trained_shapes(run.model) for one in (theirs, ours))
    differs = next((name for name, shape in before.items() if now.get(name) != shape), None)
    new = next((name for name in now if is_factor(name) and name not in before), None)
    assert ours.adapter is not None, "the run has an adapter"
    if run.adapter.from_peft is not None:
        reason = f"adapter.from_peft={run.adapter.from_peft} is another adapter"
    elif ours.adapter.scale != theirs.adapter.scale:
        reason = f"its scale is {theirs.adapter.scale:g} there, {ours.adapter.scale:g} here"
    elif differs is not None:
        found = f"is {list(now[differs])}" if differs in now else "does not train"
        reason = f"{differs} {list(before[differs])} {found} here"
    elif new is not None:
        reason = f"{new} is not part of it"
    else:
        return
    raise ValueError(
        f"start.from_run={from_run} has an adapter, and this run has another one: {reason}. Write "
        "the section adapter of that run to go on with it; leave the section out to train the "
        "merged weights; or merge them with sppo convert to-hf and give them a new adapter as "
        "model.from_hf"
    )


def _check_moments(run: RunConfig, theirs: Trainable) -> None:
    """Raise ValueError if `run` takes moments along that the run it starts from does not have."""
    assert run.start is not None, "the run starts from another"
    if not run.start.optimizer:
        return
    there = theirs.trained_shapes(run.model)
    ours = trainable_of_run(run).trained_shapes(run.model)
    missing = [name for name, shape in ours.items() if there.get(name) != shape]
    if missing:
        first = missing[0]
        was = f"has the shape {there[first]}" if first in there else "did not train"
        raise ValueError(
            f"start.optimizer=true takes the moments of {run.start.from_run} along, and there "
            f"{first} {was}; write start.optimizer=false, or train what that run has trained"
        )


def check_start_vocabulary(run: RunConfig) -> None:
    """Raise ValueError if `run` starts from a run that was trained on tokens of other vocabulary.

    Nothing is checked if that run, or its tokens, are gone by now, or if `run` has checkpoints.
    """
    file = Path("" if run.start is None else run.start.from_run) / CONFIG_FILE
    if run.start is None or has_started(run) or not file.is_file():
        return
    theirs = DataConfig.model_validate(read_json(file)["data"]).directories
    for key, directory in run.data.directories.items():
        for training in theirs.values():
            keys = (key, f"start.from_run={run.start.from_run}")
            check_same_vocabulary(open_tokens(Path(directory)), Path(training), keys=keys)


def has_started(run: RunConfig) -> bool:
    """Return whether `run` has checkpoints of its own, from which it goes on."""
    return bool(list_checkpoints(Path(run.train.output) / CHECKPOINTS_DIRECTORY))


def starting_checkpoint(run: RunConfig) -> Checkpoint | None:
    """Find and verify the checkpoint that `run` starts from; None if it names no other run.

    Raises:
        ValueError: There is no such checkpoint, or it is damaged.
    """
    return None if run.start is None else find_checkpoint(_path(run))


def check_seen(checkpoint: Checkpoint) -> None:
    """Raise ValueError unless this machine has the files of a checkpoint that rank 0 verified."""
    absence = find_absence(checkpoint.path)
    if absence is not None:
        raise InvalidCheckpointError(
            f"start.from_run: {checkpoint.path} is not here as rank 0 sees it: {absence}; it must "
            "be in a directory that all ranks share"
        )


def provenance(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a run keeps of the checkpoint it started from, and of that one's own start.

    The digest is the SHA-256 of the manifest, which has the checksums of all other files.
    """
    manifest = (checkpoint.path / MANIFEST_FILE).read_bytes()
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "digest": hashlib.sha256(manifest).hexdigest(),
        "start": checkpoint.metadata.get("start"),
    }


def _path(run: RunConfig) -> Path:
    """Return the path of the checkpoint, or of the run whose newest it is."""
    start = run.start
    assert start is not None, "the run starts from another"
    directory = Path(start.from_run)
    found = list_checkpoints(directory / CHECKPOINTS_DIRECTORY)
    paths: dict[int | str, Path | None] = dict(sorted(found))
    if not found:
        raise ValueError(
            f"start.from_run={start.from_run} holds no checkpoint in {CHECKPOINTS_DIRECTORY}/: "
            "train that run first, or give the output directory of another"
        )
    if start.step is None:
        return directory
    paths[BEST] = best_checkpoint(directory / CHECKPOINTS_DIRECTORY)
    path = paths.get(start.step)
    if path is None:
        there = ", ".join(str(step) for step, one in paths.items() if one is not None)
        raise ValueError(
            f"start.step={start.step}: {start.from_run} holds the checkpoints {there}; name one of "
            "them, or leave it out for the newest"
        )
    return path


def check_same_order(run: RunConfig, checkpoint: Checkpoint) -> None:
    """Raise ValueError if `run` takes the position in the data along, and reads another order.

    The tokens themselves are compared when the state is loaded.
    """
    if run.start is None or not run.start.data:
        return
    ours = _order(run.model_dump(mode="json"))
    theirs = _order(checkpoint.metadata["config"])
    differ = [
        f"{key} is {quoted(theirs.get(key))} there, {quoted(value)} here"
        for key, value in ours.items()
        if value != theirs.get(key)
    ]
    if differ:
        raise ValueError(
            f"start.data=true goes on where {checkpoint.path} stopped in its data, and the order "
            f"is another: {'; '.join(differ)}. Write start.data=false to begin anew"
        )


def _order(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration that say which data a step reads, with their values."""
    data = {key: value for key, value in config["data"].items() if key not in _ONLY_PLACES}
    return {
        **{f"data.{key}": value for key, value in data.items()},
        **{f"sequence.{key}": config["sequence"].get(key) for key in ("length", "longer")},
        "train.seed": config["train"]["seed"],
    }
