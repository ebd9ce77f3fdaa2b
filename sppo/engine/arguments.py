"""Checks of what Python programs give to the engine, before anything is computed.

Training gives providers of weights, and data that were checked when they were read; an engine of
plain mappings belongs to a Python program. Each error names the value, the rule and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.cost.parameters import Shape
from sppo.cost.trainable import Trainable
from sppo.engine.pipeline import Pipeline
from sppo.engine.unit import SequenceData
from sppo.kernels.elementwise import accumulation_dtype
from sppo.kernels.labels import IGNORED_LABEL
from sppo.parallel.megatron import MegatronSequenceParallel
from sppo.quoting import quoted

_INDEX_TYPES = (torch.int64, torch.int32)
_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_engine(
    model: object,
    weights: object,
    gradients: object,
    *,
    trainable: Trainable,
    pipeline: Pipeline,
) -> None:
    """Check a model, and mappings of its weights and gradients unless other ranks share them.

    Args:
        model: Shape of the model.
        weights: Weights of this rank's stages by global name, or a provider.
        gradients: Buffers of those that train, or a provider; None for evaluation only.
        trainable: Adapters, and parameters that train.
        pipeline: Stages of this rank, and the ranks that may hold other shards of the weights.

    Raises:
        TypeError: A value of another type.
        ValueError: Names, shapes, types or devices do not fit, or a gradient is its own weight.
    """
    if not isinstance(model, ModelConfig):
        raise TypeError(f"sppo.Engine(model={quoted(model)}): give it run.model of sppo.load_run")
    also = "" if trainable.is_everything else ", trainable=trainable"
    weights_advice = f"sppo.initial_weights(run.model, seed=0{also}) gives them"
    gradients_advice = f"sppo.zero_gradients(weights{also}) gives them"
    for name, value, advice in (
        ("weights", weights, weights_advice),
        ("gradients", {} if gradients is None else gradients, gradients_advice),
    ):
        is_provider = hasattr(value, "take") and hasattr(value, "release")  # arrays have take, too
        if not isinstance(value, Mapping) and not is_provider:
            raise TypeError(f"sppo.Engine({name}={quoted(value)}): tensors by name; {advice}")
    is_sharded = isinstance(pipeline.exchange, MegatronSequenceParallel)
    if not isinstance(weights, Mapping) or is_sharded:
        return
    shapes: dict[str, Shape] = {}
    for layers in pipeline.layers(model).values():
        shapes |= trainable.stage_shapes(model, layers)
    first = _check_tensors("weights", weights, shapes, advice=weights_advice)
    if first.dtype not in _FLOAT_TYPES:
        raise ValueError(f"sppo.Engine: weights are {first.dtype}; make them a floating-point type")
    if not isinstance(gradients, Mapping):
        return
    trained = {name: shape for name, shape in shapes.items() if trainable.trains(name)}
    frozen = [name for name in shapes if name in gradients and name not in trained]
    if frozen:
        raise ValueError(
            f"sppo.Engine: gradients[{frozen[0]!r}] is of a parameter that does not train; "
            f"{gradients_advice}"
        )
    sums = accumulation_dtype(first.dtype)
    _check_tensors(
        "gradients",
        gradients,
        trained,
        advice=gradients_advice,
        like=first.new_empty(0, dtype=sums),
    )
    owners = {weights[name].data_ptr(): f"weights[{name!r}]" for name in shapes}
    for name in trained:
        address, own = gradients[name].data_ptr(), f"gradients[{name!r}]"
        if address and (other := owners.setdefault(address, own)) != own:
            raise ValueError(
                f"sppo.Engine: {own} is the memory of {other}, to which gradients would be added; "
                f"{gradients_advice}"
            )


def check_step(
    model: ModelConfig,
    sequences: Sequence[SequenceData],
    boundaries: Sequence[Sequence[int]],
    *,
    num_valid: int | None,
    device: torch.device,
) -> None:
    """Check sequences, their cuts, and the number of labels that the mean divides by.

    Waits for the device.

    Raises:
        TypeError: A value of another type.
        ValueError: A value out of range, or sequences and cuts that do not fit together.
    """
    if not isinstance(sequences, Sequence):
        raise TypeError(f"sequences={quoted(sequences)}: give a list of sppo.SequenceData")
    for index, data in enumerate(sequences):
        _check_sequence(f"sequences[{index}]", data, model, device=device)
    if not isinstance(boundaries, Sequence) or len(boundaries) != len(sequences):
        example = [[0, len(data.tokens_S)] for data in sequences[:2]]
        raise ValueError(
            f"boundaries={quoted(boundaries)}: give one list of cuts for each of the "
            f"{len(sequences)} sequences, such as {example}"
        )
    for index, (data, cuts) in enumerate(zip(sequences, boundaries, strict=True)):
        _check_cuts(f"boundaries[{index}]", cuts, length=len(data.tokens_S))
    if num_valid is None:
        return
    if not _is_whole(num_valid) or num_valid < 0:
        raise ValueError(
            f"num_valid={quoted(num_valid)}: give a whole number, the labels that count on all "
            "replicas, or leave it out"
        )
    if num_valid == 0 and any(data.num_valid for data in sequences):
        raise ValueError("num_valid=0, but labels of these sequences count; leave it out")


def _check_tensors(
    what: str,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    *,
    advice: str,
    like: Tensor | None = None,
) -> Tensor:
    """Check names and shapes, and types and devices: those of `like`, else of the first tensor."""
    missing = [name for name in shapes if name not in tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"sppo.Engine: {what} lack {missing[0]}{more}; {advice}")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if not isinstance(tensor, Tensor):
            raise TypeError(f"sppo.Engine: {what}[{name!r}] is {quoted(tensor)}, not a tensor")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"sppo.Engine: {what}[{name!r}] has shape {list(tensor.shape)}, the model needs "
                f"{list(shape)}; {advice}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"sppo.Engine: {what}[{name!r}] is not contiguous; {advice}")
        like = tensor if like is None else like
        if (tensor.dtype, tensor.device) != (like.dtype, like.device):
            raise ValueError(
                f"sppo.Engine: {what}[{name!r}] is {tensor.dtype} on {tensor.device}, needs "
                f"{like.dtype} on {like.device}; {advice}"
            )
    assert like is not None, "a rank has parameters"
    return like


def _check_sequence(
    name: str, data: SequenceData, model: ModelConfig, *, device: torch.device
) -> None:
    if not isinstance(data, SequenceData):
        raise TypeError(f"{name}={quoted(data)}: give a sppo.SequenceData")
    for field in ("tokens_S", "labels_S"):
        value = getattr(data, field)
        if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype not in _INDEX_TYPES:
            raise TypeError(f"{name}.{field}={_kind(value)}: give a tensor [S] of torch.int64")
        if value.device != device and (field, value.device.type) != ("labels_S", "cpu"):
            raise ValueError(f"{name}.{field} is on {value.device}, the weights on {device}")
    tokens, labels = len(data.tokens_S), len(data.labels_S)
    if not tokens or tokens != labels:
        raise ValueError(
            f"{name}: {tokens} tokens and {labels} labels; give one label for each token, "
            "SequenceData(tokens[:-1], tokens[1:])"
        )
    starts = data.document_starts
    whole = isinstance(starts, Sequence) and all(map(_is_whole, starts))
    if not whole or any(a >= b for a, b in pairwise((-1, *starts))):
        raise ValueError(f"{name}.document_starts={quoted(starts)}: give ascending positions")
    _check_ids(name, data, vocab_size=model.vocab_size)


def _check_ids(name: str, data: SequenceData, *, vocab_size: int) -> None:
    """Raise ValueError for ids beyond the vocabulary; waits for the device."""
    wrong_tokens = (data.tokens_S < 0) | (data.tokens_S >= vocab_size)
    wrong_labels = (data.labels_S < 0) & (data.labels_S != IGNORED_LABEL)
    wrong_labels |= data.labels_S >= vocab_size
    for field, wrong in (("tokens_S", wrong_tokens), ("labels_S", wrong_labels)):
        if bool(wrong.any()):
            place = int(wrong.nonzero()[0])
            also = f", or {IGNORED_LABEL} for no target" if field == "labels_S" else ""
            raise ValueError(
                f"{name}.{field}[{place}] is {int(getattr(data, field)[place])}; ids go from 0 to "
                f"{vocab_size - 1}{also}"
            )


def _check_cuts(name: str, cuts: Sequence[int], *, length: int) -> None:
    whole = isinstance(cuts, Sequence) and len(cuts) > 1 and all(map(_is_whole, cuts))
    ascending = whole and all(a < b for a, b in pairwise(cuts))
    if not ascending or cuts[0] != 0 or cuts[-1] != length:
        raise ValueError(
            f"{name}={quoted(cuts)}: these do not tile a sequence of {length} tokens; give "
            f"ascending whole numbers from 0 to {length}"
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else quoted(value)
