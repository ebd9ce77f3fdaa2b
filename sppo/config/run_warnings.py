"""Warnings about run configurations that can be trained but probably should not be."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from sppo.config.run import RunConfig

_log = logging.getLogger(__name__)


def log_run_warnings(run: RunConfig) -> None:
    """Log every warning about `run`; without handlers of the program they appear on stderr."""
    for text in run_warnings(run):
        _log.warning("warning: %s", text)


def run_warnings(run: RunConfig) -> Iterator[str]:
    """Yield the warnings about `run`, as text of one line each."""
    yield from _positions(run)


def _positions(run: RunConfig) -> Iterator[str]:
    """Yield a warning if sequences are longer than the context of published weights or a preset."""
    model, length = run.model, run.sequence.length
    reach, scaling = model.context_reach, model.rope_scaling
    is_published = model.preset is not None or model.from_hf is not None
    if not is_published or reach is None or length <= reach:
        return
    original = reach
    if scaling is not None and scaling.type == "yarn" and scaling.original_max_positions:
        original = scaling.original_max_positions
    yarn = f"{{type: yarn, factor: {-(-length // original)}, original_max_positions: {original}}}"
    yield (
        f"sequence.length {length} is beyond the {reach} positions of this model, and weights "
        f"trained on those have never seen such; stretch them with e.g. model.rope_scaling={yarn}"
    )
