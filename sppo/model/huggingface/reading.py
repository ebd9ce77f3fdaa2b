"""Weights of a Hugging Face directory by SPPO's names: all checked first, then read one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.model.huggingface.files import StoredTensor, check_headers
from sppo.model.huggingface.layouts import part_values
from sppo.model.huggingface.stored_tensors import HfPart, HfTensor, stored_shapes

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Torch types by their names in safetensors files."""


class HfWeights(Mapping[str, Tensor]):
    """Weights of a directory by SPPO's names.

    Nothing is cached: every look-up reads the file and returns a new contiguous tensor in the
    stored type, so that a conversion holds one tensor at a time.

    Args:
        order: Names of the weights, in the order of iteration.
        tensors: Tensors that hold them.
        stored: Places of these tensors, by their names.
    """

    def __init__(
        self,
        order: Iterable[str],
        tensors: Iterable[HfTensor],
        stored: Mapping[str, StoredTensor],
    ) -> None:
        self._order = tuple(order)
        self._places: dict[str, list[tuple[StoredTensor, HfTensor, HfPart]]] = {}
        for tensor in tensors:
            for part in tensor.parts:
                places = self._places.setdefault(part.name, [])
                places.append((stored[tensor.name], tensor, part))

    def __getitem__(self, name: str) -> Tensor:
        places = self._places[name]
        result: Tensor | None = None
        for path, in_file in groupby(places, key=lambda place: place[0].path):
            with safe_open(path, framework="pt", device="cpu") as file:
                for stored, tensor, part in in_file:
                    values = part_values(file.get_tensor(stored.key), tensor, part)
                    if part.expert is None:
                        return values.clone(memory_format=torch.contiguous_format)
                    if result is None:
                        result = values.new_empty((len(places), *values.shape))
                    result[part.expert] = values
        assert result is not None, "every parameter has a place"
        return result

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def dtype(self) -> torch.dtype:
        """Narrowest type that represents exactly every stored value that is not written in fp32."""
        places = [place for places in self._places.values() for place in places]
        kinds = {_DTYPES[stored.dtype] for stored, tensor, _ in places if not tensor.is_fp32}
        return reduce(torch.promote_types, kinds)


def open_hf_weights(directory: Path, model: ModelConfig) -> HfWeights:
    """Check that ``directory`` has exactly the weights of ``model``; return them unread.

    The ``model.`` or ``transformer.`` prefix of names is optional. Rotary frequencies and GPT-2's
    masks, which older files contain, are ignored. A tied model may store its vocabulary projection
    if the projection equals the embedding: these two tensors alone are read for the check.

    Raises:
        ValueError: Missing, unknown or misshapen tensors (up to eight of each are listed), types
            other than 16, 32 or 64-bit floating point, damaged files, or a vocabulary projection
            that differs from the embedding of a tied model.
    """
    directory = Path(directory)
    stored = check_headers(directory, model)
    weights = HfWeights(stored_shapes(model), stored.layout, stored.tensors)
    if stored.tied_head is not None:
        _check_tied(directory, stored.tied_head, weights["embed.weight"])
    return weights


def read_stored(stored: StoredTensor) -> Tensor:
    """Return the values of a stored tensor, in memory mapped from the file: clone to keep them.

    The file is opened in every call, so that its pages are unmapped when the tensor is freed.
    """
    with safe_open(stored.path, framework="pt", device="cpu") as file:
        tensor: Tensor = file.get_tensor(stored.key)
    return tensor


def _check_tied(directory: Path, head: StoredTensor, embedding: Tensor) -> None:
    if head.shape != tuple(embedding.shape) or not torch.equal(
        read_stored(head).to(embedding.dtype), embedding
    ):
        raise ValueError(
            f"{directory} stores {head.key} {list(head.shape)}, which differs from the embedding "
            f"{list(embedding.shape)} although the two are tied; set tie_word_embeddings false in "
            "config.json (or model.tie_embeddings) to train both"
        )
