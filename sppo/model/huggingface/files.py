"""Safetensors files of a Hugging Face directory, and checks of their headers.

The module does not import torch, so a directory without the model's weights is refused early.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sppo.config.huggingface.model_config import check_directory
from sppo.config.json_file import read_json
from sppo.config.model import ModelConfig
from sppo.cost.parameters import Shape
from sppo.model.huggingface.stored_tensors import (
    HEAD,
    HfTensor,
    bare_name,
    hf_tensors,
    is_buffer,
    without_other_parts,
)
from sppo.quoting import one_line, quoted

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

STORED_TYPES = ("F64", "F32", "F16", "BF16")
"""Types that stored weights may have, as safetensors spells them."""

_SHOWN_FAULTS = 8
_REASON_CHARACTERS = 300
_NAME_CHARACTERS = 255
_PICKLES = (".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor in a safetensors file: path and key of the tensor, shape and type by its header."""

    path: Path
    key: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights of a model as stored in a directory.

    Attributes:
        tensors: Tensors of the model and no others, by bare name.
        layout: What lies in each of them.
        tied_head: Vocabulary projection that a tied model stores as well; None if absent.
        skipped: Number of tensors of each other part of a model, such as a vision tower.
    """

    tensors: Mapping[str, StoredTensor]
    layout: tuple[HfTensor, ...]
    tied_head: StoredTensor | None
    skipped: Mapping[str, int]


def check_headers(directory: Path, model: ModelConfig) -> StoredWeights:
    """Check by file headers that ``directory`` has exactly the weights of ``model``; return them.

    Raises:
        ValueError: Missing, unknown or misshapen tensors (up to eight of each are listed), types
            other than 16, 32 or 64-bit floating point, or damaged files.
    """
    stored, skipped = without_other_parts(stored_tensors(directory), model)
    tied_head = stored.pop(HEAD, None) if model.tie_embeddings else None
    layout = hf_tensors(model, stored)
    faults = tensor_faults(stored, {tensor.name: tensor for tensor in layout})
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise ValueError(
            f"{directory} does not hold the weights of this model:\n{lines}\n"
            "give the whole directory as it was published; in a run file leave out what changes"
            " shapes beside model.from_hf"
        )
    return StoredWeights(stored, layout, tied_head, skipped)


def tensor_faults(
    stored: Mapping[str, StoredTensor], expected: Mapping[str, HfTensor]
) -> list[str]:
    """Return a line for each way in which stored tensors differ from those expected, by name.

    They are missing, unknown, of another shape, or of a type other than :data:`STORED_TYPES`.
    """
    missing = [f"{t.full_name} {list(t.shape)}" for n, t in expected.items() if n not in stored]
    unknown = [f"{t.key} {list(t.shape)}" for n, t in stored.items() if n not in expected]
    common = [(stored[name], tensor) for name, tensor in expected.items() if name in stored]
    misshapen = [
        f"{found.key} {list(found.shape)}, needs {list(tensor.shape)}"
        for found, tensor in common
        if found.shape != tensor.shape
    ]
    foreign = [f"{t.key} {t.dtype}" for t, _ in common if t.dtype not in STORED_TYPES]
    found = {
        "missing": missing,
        "unknown": unknown,
        "wrong shape": misshapen,
        f"type not one of {', '.join(STORED_TYPES)}": foreign,
    }
    lines = []
    for title, names in found.items():
        shown = names[:_SHOWN_FAULTS]
        if len(names) > _SHOWN_FAULTS:
            shown.append(f"... and {len(names) - _SHOWN_FAULTS} more")
        lines += [f"{title}: {one_line(name, most=200)}" for name in shown]
    return lines


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every weight in ``directory`` by bare name, without the constants of older files.

    Raises:
        ValueError: No weights, a broken or missing file, an index that disagrees with its files,
            or a tensor that is stored twice.
    """
    found: dict[str, StoredTensor] = {}
    for path, expected in weight_files(directory).items():
        stored = {tensor.key: tensor for tensor in file_headers(path)}
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


def weight_files(directory: Path) -> dict[Path, set[str]]:
    """Return the weight files of ``directory``, each with its tensors according to the index.

    Without an index, the set of tensors of the single file is empty.

    Raises:
        ValueError: No directory or weight files, or an index that is broken or lacks a file.
    """
    check_directory(directory)
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return {single: set()}
    if not index.is_file():
        reason = f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}"
        for other in sorted(p.name for p in directory.glob("*") if p.suffix in _PICKLES)[:1]:
            reason += f"; {other} is a pickle, which can run code: save it as safetensors first"
        raise ValueError(reason)
    files: dict[Path, set[str]] = {}
    for key, name in _weight_map(index).items():
        files.setdefault(directory / name, set()).add(key)
    absent = sorted(path.name for path in files if not path.is_file())
    if absent:
        shown = one_line(", ".join(absent), most=_REASON_CHARACTERS)
        raise ValueError(f"{directory} lacks {shown}, named in {INDEX_FILE}")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = read_json(index)["weight_map"]
        names = {str(key): str(name) for key, name in weight_map.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = one_line(error, most=_REASON_CHARACTERS)
        raise ValueError(f"{index} is no index of weight files: {reason}") from None
    for name in names.values():
        if not name.isprintable() or Path(name).name != name or len(name) > _NAME_CHARACTERS:
            raise ValueError(f"{index} names {quoted(name)}, which is not a file beside it")
    return names


def file_headers(path: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of a safetensors file; reads no values.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        with safe_open(path, framework="np") as file:
            for key in file.keys():  # noqa: SIM118 - a handle to a file, not a mapping
                part = file.get_slice(key)
                yield StoredTensor(path, key, tuple(part.get_shape()), part.get_dtype())
    except (SafetensorError, OSError) as error:
        reason = one_line(error, most=_REASON_CHARACTERS)
        raise ValueError(f"{path} is damaged or no safetensors file: {reason}") from None
