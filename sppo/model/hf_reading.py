"""Weights of a Hugging Face directory under our names, checked first and read one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.cost.parameters import parameter_shapes
from sppo.model.hf_files import DTYPES, StoredTensor, stored_tensors
from sppo.model.hf_names import HEAD, HfTensor, hf_tensors
from sppo.quoting import one_line

_SHOWN = 8


class HfWeights(Mapping[str, Tensor]):
    """The weights of a directory by our names, in the order of ``parameter_shapes``.

    Nothing is kept: every look-up reads the disk and returns a new contiguous tensor in the stored
    type, so that a conversion holds one tensor at a time.
    """

    def __init__(self, model: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
        self._order = tuple(parameter_shapes(model))
        self._places: dict[str, tuple[StoredTensor, HfTensor, int]] = {
            part: (stored[tensor.name], tensor, index)
            for tensor in hf_tensors(model)
            for index, part in enumerate(tensor.parts)
        }

    def __getitem__(self, name: str) -> Tensor:
        stored, tensor, index = self._places[name]
        values = stored.read()
        if tensor.transposed:
            values = values.T
        start = sum(tensor.rows[:index])
        part = values.narrow(0, start, tensor.rows[index])
        return part.clone(memory_format=torch.contiguous_format)

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest type that holds every stored value exactly."""
        kinds = {DTYPES[stored.dtype] for stored, _, _ in self._places.values()}
        return reduce(torch.promote_types, kinds)


def open_hf_weights(directory: Path, model: ModelConfig) -> HfWeights:
    """Check that ``directory`` holds exactly the weights of ``model``; read none of them yet.

    Names may have their ``model.`` or ``transformer.`` prefix or not. Rotary frequencies and
    GPT-2's masks, constants that older files carry along, are ignored. A tied model may store its
    vocabulary projection if that equals the embedding.

    Raises:
        ValueError: missing, unknown or misshapen tensors (all of them are listed), types other
            than 16, 32 or 64-bit floating point, or damaged files.
    """
    directory = Path(directory)
    expected = {tensor.name: tensor for tensor in hf_tensors(model)}
    stored = stored_tensors(directory)
    duplicate = stored.pop(HEAD, None) if model.tie_embeddings else None
    faults = _faults(stored, expected)
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise ValueError(
            f"{directory} does not hold the weights of this model:\n{lines}\n"
            "give the whole directory as it was published; in a run file leave out what changes"
            " shapes beside model.from_hf"
        )
    weights = HfWeights(model, stored)
    if duplicate is not None:
        _check_tied(directory, duplicate, weights["embed.weight"])
    return weights


def load_hf_weights(directory: Path, model: ModelConfig) -> dict[str, Tensor]:
    """All weights of ``directory`` by our names, in the order of ``parameter_shapes``.

    Tensors are on the CPU, contiguous, in the stored type; memory peaks at one copy of the model
    and one tensor.

    Raises:
        ValueError: see :func:`open_hf_weights`.
    """
    return dict(open_hf_weights(directory, model))


def _faults(stored: Mapping[str, StoredTensor], expected: Mapping[str, HfTensor]) -> list[str]:
    missing = [f"{t.full_name} {list(t.shape)}" for n, t in expected.items() if n not in stored]
    unknown = [f"{t.key} {list(t.shape)}" for n, t in stored.items() if n not in expected]
    common = [(stored[name], tensor) for name, tensor in expected.items() if name in stored]
    misshapen = [
        f"{found.key} {list(found.shape)}, needs {list(tensor.shape)}"
        for found, tensor in common
        if found.shape != tensor.shape
    ]
    foreign = [f"{found.key} {found.dtype}" for found, _ in common if found.dtype not in DTYPES]
    found = {
        "missing": missing,
        "unknown": unknown,
        "wrong shape": misshapen,
        f"type not one of {', '.join(DTYPES)}": foreign,
    }
    return [line for title, names in found.items() for line in _listing(title, names)]


def _listing(title: str, names: list[str]) -> list[str]:
    more = [f"... and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return [f"{title}: {one_line(name, most=200)}" for name in [*names[:_SHOWN], *more]]


def _check_tied(directory: Path, head: StoredTensor, embedding: Tensor) -> None:
    if head.shape != tuple(embedding.shape) or not torch.equal(
        head.read().to(embedding.dtype), embedding
    ):
        raise ValueError(
            f"{directory} stores {head.key} {list(head.shape)}, which differs from the embedding "
            f"{list(embedding.shape)} although the two are tied; set tie_word_embeddings false in "
            "config.json (or model.tie_embeddings) to train both"
        )
