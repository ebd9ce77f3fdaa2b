"""Evaluation as a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sppo.config.run import RunConfig
from sppo.training.devices.choose_device import choose_device
from sppo.training.evaluation import Evaluation
from sppo.training.evaluation import evaluate as evaluate_run


def _say_nothing(_done: int, _total: int) -> None:
    """Do nothing about progress."""


def evaluate(
    run: RunConfig,
    *,
    checkpoint: Path | str | None = None,
    initial: bool = False,
    sequences: int | None = None,
    on_sequence: Callable[[int, int], None] = _say_nothing,
) -> Evaluation:
    """Loss of a run's newest weights on ``data.eval_tokens``, or ``data.tokens`` without them.

    Args:
        run: of :func:`sppo.load_run`.
        checkpoint: a particular one; None takes the run's newest.
        initial: evaluate the weights that the run starts from instead.
        sequences: evaluate the first of them, or of the samples, only.
        on_sequence: called with (sequences or samples done, all of them).

    Returns:
        ``.loss`` in nats, ``.perplexity``, and ``.by_position`` in the context.

    Raises:
        ValueError: no checkpoint, or data or weights that cannot be used.
        MemoryError: it does not fit.
    """
    if initial and checkpoint is not None:
        raise ValueError(f"initial=True and checkpoint={checkpoint}: leave one of the two out")
    if sequences is not None and sequences < 1:
        raise ValueError(f"sequences={sequences}: evaluate at least one, or leave it out")
    return evaluate_run(
        run,
        checkpoint=None if checkpoint is None else Path(checkpoint),
        initial=initial,
        max_sequences=sequences,
        on_sequence=on_sequence,
        device=choose_device(run),
    )
