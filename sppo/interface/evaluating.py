"""Evaluation as a function."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING

from sppo.config.run import RunConfig
from sppo.interface.arguments import PATH, check_argument
from sppo.training.checks.evaluation_inputs import check_evaluation

if TYPE_CHECKING:
    from sppo.training.evaluation import Evaluation


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
        TypeError: ``run`` or another argument is something else.
        ValueError: no checkpoint, or data or weights that cannot be used.
        MemoryError: it does not fit.
    """
    for name, value, *kinds in (
        ("run", run, RunConfig),
        ("checkpoint", checkpoint, PATH, None),
        ("sequences", sequences, Integral, None),
        ("on_sequence", on_sequence, Callable),
    ):
        check_argument("sppo.evaluate", name, value, *kinds)
    if sequences is not None and sequences < 1:
        raise ValueError(f"sequences={sequences}: evaluate at least one, or leave it out")
    path = None if checkpoint is None else Path(checkpoint)
    check_evaluation(run, checkpoint=path, initial=initial)
    from sppo.training.devices.choose_device import choose_device
    from sppo.training.evaluation import evaluate as evaluate_run

    return evaluate_run(
        run,
        checkpoint=path,
        initial=initial,
        max_sequences=sequences,
        on_sequence=on_sequence,
        device=choose_device(run),
    )
