"""Checks of what an evaluation reads, before it begins: tokens and weights. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from sppo.checkpoint.search import NoCheckpointError, check_any
from sppo.config import RunConfig
from sppo.data.run_tokens import open_evaluated
from sppo.hardware.file import hardware_for
from sppo.training.checks.input_checks import check_stored_weights


def check_evaluation(run: RunConfig, *, checkpoint: Path | None, initial: bool) -> None:
    """Look at what an evaluation is about to read, as far as that needs no torch.

    Args:
        run: checked.
        checkpoint: a particular one; None takes the run's newest.
        initial: the weights that the run starts from are evaluated instead.

    Raises:
        ValueError: no checkpoint, or data, weights or hardware that cannot be used.
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
    """Name the weights that a run starts from."""
    return run.model.from_hf or f"random weights of seed {run.train.seed}"


def _check_checkpoint(run: RunConfig, given: Path | None) -> None:
    """Make sure that there is one: weights that nothing has trained are evaluated on request."""
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
