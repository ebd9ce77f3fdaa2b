"""Writing of weights in the Hugging Face layout: the whole directory or nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sppo.config.huggingface.model_config import hf_config
from sppo.config.model import ModelConfig
from sppo.model.huggingface.files import INDEX_FILE, SINGLE_FILE
from sppo.model.huggingface.layouts import assemble
from sppo.model.huggingface.stored_tensors import HfTensor, hf_tensors, stored_shapes
from sppo.output_file import (
    FULL_ERRNOS,
    check_unused_directory,
    sync_directory,
    write_text,
)
from sppo.units import GIB, MIB, format_bytes

MAX_SHARD_BYTES = 5 * GIB
README_FILE = "README.md"
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_OS_ERROR = re.compile(r"os error (\d+)")
HEADER_ROOM_BYTES = MIB
"""Bytes of free space required for config.json, the index and the headers of weight files."""


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Written weight files, in order, and the parameters and bytes in all of them."""

    files: tuple[str, ...]
    num_parameters: int
    total_bytes: int


def save_hf_weights(
    directory: Path,
    weights: Mapping[str, Tensor],
    model: ModelConfig,
    *,
    dtype: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    token_ids: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    readme: str = "",
) -> SavedWeights:
    """Write config.json and the weights, in one file or in shards with an index.

    The directory is filled under a temporary name next to the final one and then renamed, so that
    a reader never sees a partial directory. ``weights`` is read one shard at a time.

    Args:
        directory: Target directory, which must not exist or must be empty.
        weights: Weights by SPPO's names, in any floating-point type.
        model: Shape of the model and, in ``model.family``, the family to write.
        dtype: Type of the stored weights: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
        max_shard_bytes: Upper bound of a weight file's tensors, unless one tensor alone exceeds it.
        token_ids: Keys of config.json that name special tokens, e.g. ``eos_token_id``.
        extra_files: Contents of further files by name, e.g. the tokenizer's.
        readme: Text of README.md; "" writes none.

    Raises:
        ValueError: Weights of another model, a model that no family describes, or a directory that
            is in use.
        OSError: ENOSPC, before anything is written, if the disk lacks the space.
    """
    directory = Path(directory)
    config = hf_config(model, dtype=dtype) | dict(token_ids or {})
    _check_names(weights, model)
    tensors = hf_tensors(model)
    sizes = {t.full_name: prod(t.shape) * _stored_type(t, dtype).itemsize for t in tensors}
    shards = plan_shards(sizes, max_shard_bytes=max_shard_bytes)
    total_bytes = sum(sizes.values())
    check_unused_directory(directory)
    extra_files = extra_files or {}
    extra_bytes = sum(map(len, extra_files.values()))
    check_space(directory, total_bytes + extra_bytes + HEADER_ROOM_BYTES)
    with whole_directory(directory) as partial:
        write_settings(partial / "config.json", config)
        by_name = {tensor.full_name: tensor for tensor in tensors}
        for name, shard in shards.items():
            write_tensors(partial / name, [by_name[key] for key in shard], weights, dtype=dtype)
        if len(shards) > 1:
            weight_map = {key: name for name, shard in shards.items() for key in shard}
            index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            write_settings(partial / INDEX_FILE, index)
        if readme:
            write_text(partial / README_FILE, readme)
        for name, contents in extra_files.items():
            (partial / name).write_bytes(contents)
    num_parameters = sum(prod(tensor.shape) for tensor in tensors)
    return SavedWeights(tuple(shards), num_parameters, total_bytes)


def plan_shards(sizes: Mapping[str, int], *, max_shard_bytes: int) -> dict[str, list[str]]:
    """Return the tensor names of each file, in order; each file is filled before the next."""
    if max_shard_bytes < 1:
        raise ValueError(f"a shard of {max_shard_bytes} bytes holds nothing; allow at least 1")
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _stored_type(tensor: HfTensor, dtype: str) -> torch.dtype:
    stored = DTYPES[dtype]
    return torch.promote_types(stored, torch.float32) if tensor.is_fp32 else stored


def _check_names(weights: Mapping[str, Tensor], model: ModelConfig) -> None:
    expected = stored_shapes(model)
    missing = [name for name in expected if name not in weights]
    unknown = [name for name in weights if name not in expected]
    if missing or unknown:
        raise ValueError(
            f"these are not the weights of the model: missing {_some(missing)}, "
            f"unknown {_some(unknown)}"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (", ".join(names[:4]) or "none") + more


def check_space(directory: Path, needed_bytes: int) -> None:
    """Raise OSError (ENOSPC) if the disk of ``directory`` has fewer free bytes."""
    existing = next(path for path in [directory, *directory.absolute().parents] if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if needed_bytes > free_bytes:
        raise OSError(
            errno.ENOSPC,
            f"needs {format_bytes(needed_bytes)}, {format_bytes(free_bytes)} are free",
            str(directory),
        )


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """Yield a directory with a temporary name; rename it to ``directory`` if the body succeeds.

    If the body fails, delete the directory and every parent that was created.
    """
    directory = directory.resolve()
    made = [parent for parent in directory.parents if not parent.exists()]
    partial = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        for path in [*partial.iterdir(), partial]:
            # The rename must not become durable before the contents.
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        partial.rename(directory)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
            full = OSError(error.errno, error.strerror, str(directory))
            full.add_note("nothing was written")
            raise full from error
        raise
    sync_directory(directory.parent)


def write_settings(path: Path, value: Mapping[str, Any]) -> None:
    """Write settings as JSON for people to read, in alphabetical order."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_tensors(
    path: Path, tensors: Sequence[HfTensor], weights: Mapping[str, Tensor], *, dtype: str
) -> None:
    """Write a safetensors file; ``weights`` has the parts of the tensors by SPPO's names."""
    contents: dict[str, Tensor] = {}
    # The tensors of all experts are made of one parameter, which is looked up once.
    for _, group in groupby(tensors, key=lambda tensor: tensor.parts[0].name):
        made = list(group)
        parts = {name: weights[name] for name in {p.name: p for t in made for p in t.parts}}
        for tensor in made:
            contents[tensor.full_name] = assemble(tensor, parts).to(_stored_type(tensor, dtype))
    # Created here because safetensors would create a file that only its owner can read.
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(contents, path, metadata={"format": "pt"})
    except SafetensorError as error:
        code = _OS_ERROR.search(str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    path.chmod(mode)
