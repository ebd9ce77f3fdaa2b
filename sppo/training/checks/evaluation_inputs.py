"""Checks of the inputs of an evaluation (tokens, weights) before it begins. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from sppo.checkpoint.newest import NoCheckpointError, check_any
from sppo.config import RunConfig
from sppo.data.run_tokens import open_evaluated
from sppo.hardware.file import hardware_for
from sppo.training.checks.input_checks import check_stored_weights


def check_evaluation(run: RunConfig, *, checkpoint: Path | None, initial: bool) -> None:
    """Raise ValueError if inputs of an evaluation cannot be used, as far as torch is not needed.

    Args:
        run: Validated run configuration.
        checkpoint: Path of a checkpoint; None for the newest checkpoint of the run.
        initial: The initial weights of the run are evaluated instead of a checkpoint.

    Raises:
        ValueError: There is no checkpoint, or data, weights or hardware cannot be used.
    """
    if not initial:
        _check_checkpoint(run, checkpoint)
    elif checkpoint is not None:
        raise ValueError(
            f"--initial and --checkpoint {checkpoint}: leave one of the two out (in Python "
            "initial and checkpoint)"
        )
    else:
        check_stored_weights(run)
    open_evaluated(run)
    hardware_for(run.hardware)


def initial_weights(run: RunConfig) -> str:
    """Return the name of the initial weights of a run, for messages."""
    return run.model.from_hf or f"random weights of seed {run.train.seed}"


def _check_checkpoint(run: RunConfig, given: Path | None) -> None:
    """Raise ValueError if the run, or the path `given`, has no checkpoint."""
    if given is not None:
        check_any(given)
        return
    try:
        check_any(run.train.output)
    except NoCheckpointError as error:
        raise ValueError(
            f"train.output: {error}{'' if str(error).endswith('?') else '.'} To evaluate "
            f"{initial_weights(run)}, which the run starts from, write --initial (in Python "
            "initial=True)"
        ) from None
