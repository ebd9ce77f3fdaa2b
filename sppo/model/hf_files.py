"""Which safetensors files a Hugging Face directory has and what their headers promise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sppo.config.json_file import read_json
from sppo.cost.parameters import Shape
from sppo.model.hf_names import bare_name, is_buffer
from sppo.quoting import one_line, quoted

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_REASON_CHARACTERS = 300
_NAME_CHARACTERS = 255
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "chat_template.*",
    "generation_config.json",
)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Safetensors spelling of the types that weights may have."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: where it is, and what its header says about it."""

    path: Path
    key: str
    shape: Shape
    dtype: str

    def read(self) -> Tensor:
        """The values, still in the file's pages: clone what shall outlive them.

        The file is opened anew each time, so that its pages leave this process with the tensor.
        """
        with safe_open(self.path, framework="pt", device="cpu") as file:
            tensor: Tensor = file.get_tensor(self.key)
        return tensor


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every weight in ``directory`` by bare name; constants of older files are left out.

    Raises:
        ValueError: no weights, a broken or missing file, an index that disagrees with its files,
            or one tensor twice.
    """
    found: dict[str, StoredTensor] = {}
    for path, expected in weight_files(directory).items():
        stored = {tensor.key: tensor for tensor in _headers(path)}
        absent = sorted(expected - stored.keys())
        if absent:
            raise ValueError(
                f"{path} lacks {one_line(absent[0])}, which {INDEX_FILE} says it holds"
            )
        for key, tensor in stored.items():
            name = bare_name(key)
            if is_buffer(name):
                continue
            if name in found:
                raise ValueError(
                    f"{path} holds {one_line(key)}, which {found[name].path.name} holds as "
                    f"{one_line(found[name].key)}"
                )
            found[name] = tensor
    return found


def tokenizer_files(directory: Path) -> list[Path]:
    """What belongs to the tokenizer in ``directory``, with the settings of generation."""
    found = {path for pattern in _TOKENIZER_FILES for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file())


def weight_files(directory: Path) -> dict[Path, set[str]]:
    """The weight files, each with the tensors that the index promises in it.

    Raises:
        ValueError: none, or an index that is broken or names a file that is not there.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return {single: set()}
    if not index.is_file():
        raise ValueError(
            f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}{_hint(directory)}"
        )
    files: dict[Path, set[str]] = {}
    for key, name in _weight_map(index).items():
        files.setdefault(directory / name, set()).add(key)
    absent = sorted(path.name for path in files if not path.is_file())
    if absent:
        shown = one_line(", ".join(absent), most=_REASON_CHARACTERS)
        raise ValueError(f"{directory} lacks {shown}, named in {INDEX_FILE}")
    return files


def _hint(directory: Path) -> str:
    others = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
    if not others:
        return ""
    return f"; {others[0]} is a pickle, which can run code: save it as safetensors first"


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = read_json(index)["weight_map"]
        names = {str(key): str(name) for key, name in weight_map.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = one_line(error, most=_REASON_CHARACTERS)
        raise ValueError(f"{index} is no index of weight files: {reason}") from None
    outside = [name for name in names.values() if not _is_file_name(name)]
    if outside:
        raise ValueError(f"{index} names {quoted(outside[0])}, which is not a file beside it")
    return names


def _is_file_name(name: str) -> bool:
    return name.isprintable() and Path(name).name == name and len(name) <= _NAME_CHARACTERS


def _headers(path: Path) -> Iterator[StoredTensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for key in file.keys():  # noqa: SIM118 - a handle to a file, not a mapping
                part = file.get_slice(key)
                yield StoredTensor(path, key, tuple(part.get_shape()), part.get_dtype())
    except (SafetensorError, OSError) as error:
        reason = one_line(error, most=_REASON_CHARACTERS)
        raise ValueError(f"{path} is damaged or no safetensors file: {reason}") from None
