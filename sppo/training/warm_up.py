"""Warm-up of a rank: steps of tiny models, which load libraries before memory is measured."""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import torch

from sppo.config import RunConfig
from sppo.config.model import ModelConfig
from sppo.cost.trainable import Trainable, trainable_of_run
from sppo.engine.engine import Engine
from sppo.engine.unit import SequenceData
from sppo.model.gradients import zero_gradients
from sppo.optim.adamw import AdamW
from sppo.optim.gradient_norm import clip_, global_norm
from sppo.training.devices.device import Device
from sppo.training.state import DTYPES, loss_terms

_WARM_UP_TOKENS = 64
_MOST_LENGTHS = 16
"""Largest number of distinct lengths with a step each; equal cuts have one or two lengths."""
_TINY = {
    "preset": None,
    "from_hf": None,
    "vocab_size": 64,
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "mlp_size": 32,
    "max_positions": 2 * _WARM_UP_TOKENS,
}


def warm_up(run: RunConfig, *, lengths: Sequence[int], device: Device) -> None:
    """Train a step of a tiny model, then one of a layer of each kind for each length on this rank.

    The first step of a process loads libraries, starts threads, and compiles kernels for every
    shape of a matrix product (on a CPU with bf16 two thirds of a MiB each): tens of MiB and tenths
    of a second that belong to no bucket and no phase of a run. Thus they are part of the baseline,
    before memory and time are measured. The models are discarded.

    Args:
        run: Validated run configuration.
        lengths: Lengths of the subsequences, in tokens.
        device: Device that computes.
    """
    kinds = _layer_of_each_kind(run.model)
    tiny = run.model.model_copy(update=_TINY | kinds)
    _warm_up_step(
        run,
        tiny,
        cuts=(0, _WARM_UP_TOKENS, 2 * _WARM_UP_TOKENS),
        with_optimizer=True,
        device=device,
    )
    # Each sequence-parallel rank holds a shard of a subsequence.
    own = {ceil(tokens / run.parallel.sequence_parallel_degree) for tokens in lengths}
    for tokens in sorted(own, reverse=True)[:_MOST_LENGTHS]:
        # Two subsequences, so that the second has a prefix.
        cuts = (0, tokens, 2 * tokens) if len(lengths) > 1 else (0, tokens)
        most = max(run.model.max_positions or 0, cuts[-1])
        model = run.model.model_copy(update={"max_positions": most} | kinds)
        _warm_up_step(run, model, cuts=cuts, with_optimizer=False, device=device)
    gc.collect()  # the engine's parts refer to each other
    device.trim()


def _layer_of_each_kind(model: ModelConfig) -> dict[str, object]:
    """Return the fields of a model of one layer with attention, and one without if there are."""
    if model.linear_attention is None:
        return {"num_layers": 1, "layer_types": None}
    return {"num_layers": 2, "layer_types": ("linear", "full")}


def _warm_up_step(
    run: RunConfig,
    model: ModelConfig,
    *,
    cuts: tuple[int, ...],
    with_optimizer: bool,
    device: Device,
) -> None:
    dtype, place = DTYPES[run.train.dtype], device.torch_device
    trainable = _trainable_layer(run)
    weights = {
        name: torch.zeros(shape, dtype=dtype, device=place)
        for name, shape in trainable.parameter_shapes(model).items()
    }
    gradients = zero_gradients(weights, trainable=trainable)
    engine = Engine(
        model,
        weights=weights,
        gradients=gradients,
        policy="keep_attention",
        loss_terms=loss_terms(run),  # kernels are compiled for these terms
        trainable=trainable,
    )
    tokens = torch.arange(cuts[-1] + 1) % model.vocab_size
    engine.accumulate([device.put(SequenceData(tokens[:-1], tokens[1:]))], [cuts])
    if with_optimizer:
        optimizer = AdamW({name: weights[name] for name in gradients}, config=run.optimizer)
        clip_(gradients, norm=global_norm(gradients), clip_norm=run.optimizer.clip_norm or 1.0)
        optimizer.step(gradients, lr=0.0)


def _trainable_layer(run: RunConfig) -> Trainable:
    """Return what trains in a model whose layers stand for every layer of the run."""
    trainable = trainable_of_run(run)
    if trainable.is_everything:
        return trainable
    names = {
        re.sub(r"^layers\.\d+", "layers.*", name) for name in trainable.trained_shapes(run.model)
    }
    adapter = trainable.adapter and replace(trainable.adapter, layers=None)
    return Trainable(adapter, tuple(sorted(names)))
