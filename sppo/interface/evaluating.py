"""Evaluation in the Python interface."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING

from sppo.config.run import RunConfig
from sppo.config.run_warnings import log_run_warnings
from sppo.interface.arguments import PATH, check_argument
from sppo.training.checks.input_checks import check_evaluation

if TYPE_CHECKING:
    from sppo.training.evaluation import Evaluation


def _say_nothing(_done: int, _total: int) -> None:
    """Ignore the progress."""


def evaluate(
    run: RunConfig,
    *,
    checkpoint: Path | str | None = None,
    initial: bool = False,
    sequences: int | None = None,
    on_sequence: Callable[[int, int], None] = _say_nothing,
) -> Evaluation:
    """Return the loss of a run's newest weights on ``data.eval_tokens``, or else ``data.tokens``.

    Args:
        run: Run configuration from :func:`sppo.load_run`.
        checkpoint: Directory of a checkpoint; None uses the newest checkpoint of the run.
        initial: Evaluate the initial weights of the run instead.
        sequences: Number of sequences, or samples, to evaluate from the first on; None evaluates
            all.
        on_sequence: Function called with (number of sequences or samples done, total number).

    Returns:
        Evaluation with ``.loss`` in nats, ``.perplexity``, and ``.by_position`` in the context.

    Raises:
        TypeError: ``run`` or another argument has another type.
        ValueError: There is no checkpoint, or data or weights cannot be used.
        MemoryError: The evaluation does not fit into memory.
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
    log_run_warnings(run)
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
