"""Warnings and hints about runs that can be trained, and probably should not be."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from sppo.config.adapter import AdapterConfig
from sppo.config.huggingface.model_config import model_fields, read_config
from sppo.config.model import ModelConfig
from sppo.config.model.presets import PRESETS
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
_LOW_ADAPTER_LR = 5e-5
"""Learning rate below which adapters learn little: they need about ten times that of weights."""


def run_hints(run: RunConfig) -> Iterator[str]:
    """Yield hints of ``sppo config check`` about values that are unusual, one line each.

    The learning rate is one for random weights, and the weights are published ones; or a section
    ``adapter`` has what usually learns less, or what cannot be served.
    """
    lr, weights = run.optimizer.lr, run.model.from_hf
    if run.adapter is not None:
        yield from _adapter_hints(run, run.adapter)
    elif weights is not None and lr >= _HIGH_LR:
        default = "" if "lr" in run.optimizer.model_fields_set else " (the default)"
        yield (
            f"optimizer.lr {lr:g}{default} is one for random weights; published weights of more "
            "than a hundred million parameters are usually trained with 1e-5 to 5e-5"
        )


def _adapter_hints(run: RunConfig, adapter: AdapterConfig) -> Iterator[str]:
    """Yield hints about a run with adapters; docs/howto/fit_with_adapters.md has their sources."""
    if run.model.from_hf is None and run.start is None:
        yield (
            "the adapter is beside random weights, which stay as they are; name trained ones with "
            "model.from_hf or start.from_run"
        )
    if run.optimizer.lr < _LOW_ADAPTER_LR:
        yield (
            f"optimizer.lr {run.optimizer.lr:g} is one for whole weights; adapters usually need "
            "about ten times as much, such as 2e-4"
        )
    if adapter.targets is not None and not {"gate", "up", "down"} & {*adapter.targets}:
        yield (
            "adapter.targets has attention alone; adapters of all projections usually learn more: "
            "leave it out"
        )
    if not adapter.also_train and _is_stretched(run.model):
        yield (
            "positions are stretched beyond those of the base; adapters alone learn longer "
            "contexts badly: write adapter.also_train=[norms, embed]"
        )
    if adapter.also_train:
        yield (
            "vLLM serves no adapter with whole tensors beside it (adapter.also_train); serve the "
            "merged model that sppo convert to-hf writes"
        )


def _is_stretched(model: ModelConfig) -> bool:
    """Return whether rotary positions are others than those of the preset or the files."""
    if model.from_hf is not None:
        fields = model_fields(read_config(Path(model.from_hf)))
    elif model.preset is not None:
        fields = PRESETS[model.preset]
    else:
        return model.rope_scaling is not None
    base = ModelConfig.model_validate(fields)
    return (model.rope_scaling, model.rope_theta) != (base.rope_scaling, base.rope_theta)
