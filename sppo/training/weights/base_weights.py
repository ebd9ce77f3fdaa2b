"""Base of a run that freezes parameters: the weights that its checkpoints leave out.

They are those that the run started from: ``model.from_hf``, a checkpoint of another run, or random
weights. Checkpoints keep a digest of them, so that others are refused.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from sppo.checkpoint.newest import Checkpoint, find_checkpoint, open_checkpoint
from sppo.config import RunConfig
from sppo.cost.parameters import parameter_shapes
from sppo.cost.trainable import trainable_of_run
from sppo.model.huggingface.digest import weights_digest
from sppo.training.starting_checkpoint import provenance


def base_of(run: RunConfig, start: Checkpoint | None) -> dict[str, str] | None:
    """Return name and digest of the base of a run; None if no parameter is frozen.

    Args:
        run: Validated run configuration.
        start: Checkpoint of another run that it started from, if it did.

    Raises:
        ValueError: The weights are not there, or damaged.
        OSError: A file cannot be read.
    """
    if trainable_of_run(run).is_everything:
        return None
    name = run.initial_weights
    if start is not None:
        name, digest = str(start.path), str(provenance(start)["digest"])
    elif run.hf_weights is not None:
        digest = weights_digest(Path(run.hf_weights), run.model)
    else:
        shapes = sorted(parameter_shapes(run.model).items())
        generated = repr((run.train.seed, run.model.init_std, run.model.num_layers, shapes))
        digest = hashlib.sha256(generated.encode()).hexdigest()
    return {"name": name, "digest": digest}


def run_of(checkpoint: Checkpoint) -> RunConfig:
    """Return the configuration of the run that wrote a checkpoint."""
    return RunConfig.model_validate(checkpoint.metadata["config"])


def has_base(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint leaves out frozen parameters."""
    return checkpoint.metadata.get("base") is not None


def checked_start(checkpoint: Checkpoint) -> Checkpoint | None:
    """Check that the base of a checkpoint is there as it was when the run began.

    Returns:
        The checkpoint of another run that is its base; None if the base is none, or if the
        checkpoint leaves nothing out.

    Raises:
        ValueError: The base is not there, is damaged, or has changed.
    """
    if not has_base(checkpoint):
        return None
    kept = checkpoint.metadata["base"]
    try:
        start = start_of(checkpoint)
        if start is not None:
            start = find_checkpoint(start.path)
        base = base_of(run_of(checkpoint), start)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{checkpoint.path} holds only the parameters that train, and the others cannot be "
            f"read from {kept['name']}: {error}. Put these weights back, and call this in the "
            "directory in which the run was started"
        ) from None
    if base is None or base["digest"] != kept["digest"]:
        raise ValueError(
            f"{checkpoint.path} was trained beside other weights than {kept['name']} holds now: "
            "put those back with which the run began"
        )
    if start is not None:
        checked_start(start)
    return start


def start_of(checkpoint: Checkpoint) -> Checkpoint | None:
    """Return the checkpoint of another run that is the base of one; None if the base is none.

    Its files are not verified, as :func:`checked_start` does.
    """
    start = checkpoint.metadata.get("start")
    if start is None or not has_base(checkpoint):
        return None
    return open_checkpoint(Path(start["path"]))
