"""Ready-made ids in ``.npy`` files, one document each, and their loss masks.

``NAME.mask.npy`` is the loss mask of the ids in ``NAME.npy``: one bool per id, true if predicting
the id counts in the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sppo.array_file import map_array
from sppo.data.preparation.documents import exists
from sppo.data.preparation.opening import reading
from sppo.data.preparation.tokenizers import EncodedShard, EndOfDocument, end_id
from sppo.data.tokens import MAX_VOCAB_SIZE, TokenizerDescription
from sppo.quoting import one_line

_SUFFIX = ".npy"
_MASK_SUFFIX = ".mask.npy"
_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class IdsTokenizer:
    """Tokenizer for ready-made ids, with their loss masks."""

    vocab_size: int
    _: KW_ONLY
    end_of_document: int | None = None

    @property
    def description(self) -> TokenizerDescription:
        """Description of the tokenizer, recorded in ``meta.json``."""
        return TokenizerDescription(name="ids", end_of_document=self.end_of_document)

    def encode_file(self, path: Path) -> Iterator[EncodedShard]:
        """Yield the array in a file, one block at a time."""
        ids, mask = _map_ids(path)
        source_bytes = path.stat().st_size
        with reading(path):
            for start in range(0, len(ids), _BLOCK_TOKENS):
                block = np.asarray(ids[start : start + _BLOCK_TOKENS])
                counts = None if mask is None else mask[start : start + _BLOCK_TOKENS]
                yield EncodedShard(block, False, block.nbytes, counts)
                source_bytes -= block.nbytes
        yield EncodedShard(ids[:0], True, source_bytes)


def scan_ids(
    paths: Sequence[Path], *, vocab_size: int | None, end_of_document: EndOfDocument
) -> IdsTokenizer:
    """Check every id in the files, and their loss masks; return a tokenizer with their vocabulary.

    Args:
        paths: Paths of ``.npy`` files of ids.
        vocab_size: Size of the vocabulary; None for the largest id + 1.
        end_of_document: Id appended to every document; see :data:`EndOfDocument`.

    Raises:
        ValueError: An array is not 1-D integers, an id is below 0 or not below the vocabulary
            size, or a mask does not have one bool per id.
    """
    limit = MAX_VOCAB_SIZE if vocab_size is None else vocab_size
    if not 1 <= limit <= MAX_VOCAB_SIZE:
        raise ValueError(
            f"--vocab-size {limit}: a vocabulary has between 1 and {MAX_VOCAB_SIZE} ids"
        )
    largest = -1
    for path in paths:
        largest = max(largest, _check_ids(path, limit=limit, given=vocab_size is not None))
    end = end_id(end_of_document, own=None, vocab_size=limit)
    largest = largest if end is None else max(largest, end)
    return IdsTokenizer(vocab_size or largest + 1, end_of_document=end)


def without_masks(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Return the paths that are not loss masks, in order.

    Raises:
        ValueError: The ids of a mask are missing, or all paths are masks.
    """
    for path in paths:
        ids = path.with_name(path.name.removesuffix(_MASK_SUFFIX) + _SUFFIX)
        if _is_mask(path) and not exists(ids):
            raise ValueError(
                f"{path}: the loss mask of {ids.name}, which is not beside it; add it, or rename or"
                " remove the mask"
            )
    kept = tuple(path for path in paths if not _is_mask(path))
    if not kept:
        raise ValueError(
            f"{paths[0]}: a loss mask, and no ids are given; give the .npy files beside the masks"
        )
    return kept


def _is_mask(path: Path) -> bool:
    return path.name.endswith(_MASK_SUFFIX)


def _map_ids(path: Path) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Memory-map the ids in ``path``, int [n], and the loss mask beside it, bool [n], if any."""
    fix = "--tokenizer ids reads .npy files of whole numbers with one axis, one document each"
    ids = _map(path, fix)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{path}: {one_line(ids.dtype)} of shape {list(ids.shape)}; {fix}")
    mask_path = path.with_name(path.name.removesuffix(_SUFFIX) + _MASK_SUFFIX)
    if path.suffix != _SUFFIX or not exists(mask_path):
        return ids, None
    fix = f"a loss mask is a .npy file with one bool for each id of {path.name}"
    mask = _map(mask_path, fix)
    if mask.dtype != np.bool_ or mask.shape != ids.shape:
        raise ValueError(
            f"{mask_path}: {one_line(mask.dtype)} of shape {list(mask.shape)}, not bool of shape"
            f" [{len(ids)}]; {fix}"
        )
    return ids, mask


def _map(path: Path, fix: str) -> NDArray[Any]:
    with reading(path):
        try:
            return map_array(path)
        except ValueError as error:
            raise ValueError(f"{error}; {fix}") from None


def _check_ids(path: Path, *, limit: int, given: bool) -> int:
    """Check all ids in ``path``, and return the largest, or -1 if there are none."""
    ids, _ = _map_ids(path)
    largest = -1
    for start in range(0, len(ids), _BLOCK_TOKENS):
        block = ids[start : start + _BLOCK_TOKENS]
        low, high = int(block.min()), int(block.max())
        if low < 0:
            where = start + int(np.argmax(block < 0))
            raise ValueError(
                f"{path}: id {int(ids[where])} at position {where}; ids are at least 0."
                " Replace padding and ignored positions before writing the file"
            )
        if high >= limit:
            where = start + int(np.argmax(block >= limit))
            fix = f"set --vocab-size to at least {high + 1}" if given else "ids have 32 bits"
            raise ValueError(
                f"{path}: id {int(ids[where])} at position {where}, but the vocabulary has"
                f" {limit} ids (0 to {limit - 1}); {fix}"
            )
        largest = max(largest, high)
    return largest
