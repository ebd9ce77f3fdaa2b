"""Warnings and hints about runs that can be trained, and probably should not be."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from sppo.config.run import RunConfig

_log = logging.getLogger(__name__)

_SLOWEST_BF16_DECAY = 0.99
"""Largest decay rate with which steady gradients still move a second moment in bf16, whose
neighbours are 0.4 to 0.8 % apart."""


def log_run_warnings(run: RunConfig) -> None:
    """Log every warning about `run`; without handlers of the program they appear on stderr."""
    for text in run_warnings(run):
        _log.warning("warning: %s", text)


def run_warnings(run: RunConfig) -> Iterator[str]:
    """Yield warnings about what can be trained but probably should not be, one line each.

    Sequences are longer than the context of published weights or a preset, the second moment
    changes by less than bf16 resolves, or the data of a validation is trained on.
    """
    if run.optimizer.moments == "bf16" and run.optimizer.betas[1] > _SLOWEST_BF16_DECAY:
        yield (
            f"optimizer.betas[1]={run.optimizer.betas[1]:g} changes the second moment by less in a "
            f"step than optimizer.moments=bf16 resolves; lower it to at most {_SLOWEST_BF16_DECAY}"
        )
    for name, own in run.evaluated_sets.items():
        if own.tokens in run.data.directories.values():
            yield (
                f"validation.sets.{name}.tokens {own.tokens} is trained on, so its loss does not "
                "say how the model does on other text; sppo data prepare --held-out 1% sets some "
                "aside"
            )
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


_HIGH_LR = 1e-4
"""Learning rate from which the training of all published weights is likely to undo them."""


def run_hints(run: RunConfig) -> Iterator[str]:
    """Yield hints of ``sppo config check`` about values that are unusual, one line each.

    The learning rate is one for random weights, and the weights are published ones.
    """
    lr, weights = run.optimizer.lr, run.model.from_hf
    if weights is not None and lr >= _HIGH_LR:
        default = "" if "lr" in run.optimizer.model_fields_set else " (the default)"
        yield (
            f"optimizer.lr {lr:g}{default} is one for random weights; published weights of more "
            "than a hundred million parameters are usually trained with 1e-5 to 5e-5"
        )
