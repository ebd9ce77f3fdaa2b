"""Weights of adapters in the files of PEFT: checked and read one by one, written and read back."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from sppo.config.adapter import AdapterConfig
from sppo.config.model import ModelConfig
from sppo.cost.trainable import trainable_of
from sppo.model.huggingface.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_adapter,
    peft_config,
    peft_tensors,
)
from sppo.model.huggingface.reading import HfWeights, read_stored
from sppo.model.huggingface.stored_tensors import HEAD
from sppo.model.huggingface.writing import (
    DTYPES,
    HEADER_ROOM_BYTES,
    README_FILE,
    SavedWeights,
    check_space,
    whole_directory,
    write_settings,
    write_tensors,
)
from sppo.output_file import check_unused_directory, write_text

_DTYPE = "fp32"
"""Type of the written tensors: that of the master weights."""


def open_adapter(directory: Path, model: ModelConfig, adapter: AdapterConfig) -> HfWeights:
    """Check that a directory holds an adapter as a run describes it; return its weights unread.

    Args:
        directory: Directory that PEFT, or ``sppo convert to-peft``, has written.
        model: Model of the run.
        adapter: Section ``adapter`` of the run.

    Raises:
        ValueError: As in :func:`.peft_format.check_adapter`; or the two copies of a tied embedding
            differ.
        OSError: A file cannot be read.
    """
    stored = check_adapter(directory, model, adapter)
    trainable = trainable_of(adapter, None, model=model)
    tensors = peft_tensors(model, trainable)
    tied = [stored[tensor.name] for tensor in tensors if tensor.parts[0].name == "embed.weight"]
    if len(tied) == 2 and not torch.equal(*map(read_stored, tied)):
        raise ValueError(
            f"{directory} holds an embedding and a {HEAD} that differ, although the model ties "
            "the two: PEFT has trained them apart; set model.tie_embeddings=false to train both"
        )
    return HfWeights(trainable.trained_shapes(model), tensors, stored)


def save_adapter(
    directory: Path,
    weights: Mapping[str, Tensor],
    model: ModelConfig,
    adapter: AdapterConfig,
    *,
    base: str | None,
    extra_files: Mapping[str, bytes] | None = None,
    readme: str = "",
) -> SavedWeights:
    """Write an adapter in fp32, the whole directory or nothing, and read it back.

    Args:
        directory: Target directory, which must not exist or must be empty.
        weights: Whole trained parameters by SPPO's names, among others.
        model: Model with the adapter.
        adapter: The adapter.
        base: Directory of the weights beside the adapter; None if they have none.
        extra_files: Contents of further files by name, e.g. the tokenizer's.
        readme: Text of README.md; "" writes none.

    Raises:
        ValueError: PEFT's files cannot hold the adapter, or the directory is in use.
        OSError: ENOSPC, before anything is written, if the disk lacks the space; EIO if the files
            read otherwise than they were written.
    """
    config = peft_config(model, adapter, base=base)
    tensors = peft_tensors(model, trainable_of(adapter, None, model=model))
    num_parameters = sum(prod(tensor.shape) for tensor in tensors)
    total_bytes = num_parameters * DTYPES[_DTYPE].itemsize
    extra_files = extra_files or {}
    check_unused_directory(directory)
    check_space(directory, total_bytes + sum(map(len, extra_files.values())) + HEADER_ROOM_BYTES)
    with whole_directory(directory) as partial:
        write_settings(partial / CONFIG_FILE, config)
        write_tensors(partial / WEIGHTS_FILE, tensors, weights, dtype=_DTYPE)
        if readme:
            write_text(partial / README_FILE, readme)
        for name, contents in extra_files.items():
            (partial / name).write_bytes(contents)
        for name, written in open_adapter(partial, model, adapter).items():
            if not torch.equal(written, weights[name].detach().cpu().to(written.dtype)):
                path = str(directory / WEIGHTS_FILE)
                raise OSError(errno.EIO, f"{name} reads otherwise than it was written", path)
    return SavedWeights((WEIGHTS_FILE,), num_parameters, total_bytes)
