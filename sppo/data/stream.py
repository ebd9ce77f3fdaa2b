"""Reading parts of the token stream: ids, starts of documents, and the loss mask."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sppo.data.array_file import require_whole
from sppo.data.tokens import LOSS_MASK_FILE, TOKENS_FILE, TokenData


def read_ids(data: TokenData, low: int, high: int) -> NDArray[np.int64]:
    """Return the ids of tokens [low, high) of the stream, int64 [high - low].

    Raises:
        ValueError: An id is larger than any that was written, or the file has become shorter.
    """
    require_whole(data.tokens)
    ids = data.tokens[low:high].astype(np.int64)
    _check_ids(data, ids, first=low)
    return ids


def document_starts(data: TokenData, low: int, high: int) -> NDArray[np.int64]:
    """Return the positions in [low, high) of the stream at which documents start, int64.

    Raises:
        ValueError: The file has become shorter.
    """
    require_whole(data.document_offsets)
    starts = data.document_offsets[:-1]
    begin, end = np.searchsorted(starts, (low, high))
    return np.array(starts[begin:end], dtype=np.int64)


def counting_tokens(data: TokenData, low: int, high: int) -> NDArray[np.bool_]:
    """Return the loss mask of tokens [low, high) of the stream, bool [high - low].

    True if predicting the token counts in the loss; True for all tokens without a loss mask.

    Raises:
        ValueError: A byte is neither 0 nor 1, or the file has become shorter.
    """
    if data.loss_mask is None:
        return np.ones(high - low, dtype=np.bool_)
    require_whole(data.loss_mask)
    mask = data.loss_mask[low:high]
    if mask.max(initial=0) > 1:
        where = low + int(np.argmax(mask))
        raise ValueError(
            f"{data.directory / LOSS_MASK_FILE}: byte {data.loss_mask[where]} at token {where}, "
            "neither 0 nor 1: the file has changed since it was written; copy it again or prepare "
            "it again with --force"
        )
    counts: NDArray[np.bool_] = mask != 0
    return counts


def _check_ids(data: TokenData, ids: NDArray[np.int64], *, first: int) -> None:
    # A damaged file would otherwise surface as an index error deep inside a kernel.
    largest = int(ids.max())
    if largest > data.meta.max_id:
        where = first + int(np.argmax(ids))
        raise ValueError(
            f"{data.directory / TOKENS_FILE}: id {largest} at token {where}, but the largest id"
            f" written was {data.meta.max_id}: the file has changed since; copy it again or"
            " prepare it again with --force"
        )
