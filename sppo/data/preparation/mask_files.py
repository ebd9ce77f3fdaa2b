"""Loss masks of ready-made ids: ``NAME.mask.npy`` is the mask of the ids in ``NAME.npy``.

A mask has one bool per id, true if predicting the id counts in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sppo.data.array_file import map_array
from sppo.data.preparation.documents import reading
from sppo.quoting import one_line

_SUFFIX = ".npy"
_MASK_SUFFIX = ".mask.npy"


def without_masks(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Return the paths that are not loss masks, in order.

    Raises:
        ValueError: The ids of a mask are missing, or all paths are masks.
    """
    for path in paths:
        ids = _ids_of(path)
        if ids is not None and not _exists(ids):
            raise ValueError(
                f"{path}: the loss mask of {ids.name}, which is not beside it; add it, or rename or"
                " remove the mask"
            )
    kept = tuple(path for path in paths if _ids_of(path) is None)
    if not kept:
        raise ValueError(
            f"{paths[0]}: a loss mask, and no ids are given; give the .npy files beside the masks"
        )
    return kept


def map_loss_mask(ids_path: Path, *, num_ids: int) -> NDArray[np.bool_] | None:
    """Memory-map the loss mask beside a file of ids; return None if there is none.

    Raises:
        ValueError: The mask does not have one bool per id, or cannot be read.
    """
    path = ids_path.with_name(ids_path.name.removesuffix(_SUFFIX) + _MASK_SUFFIX)
    if ids_path.suffix != _SUFFIX or not _exists(path):
        return None
    fix = f"a loss mask is a .npy file with one bool for each id of {ids_path.name}"
    with reading(path):
        try:
            mask: NDArray[Any] = map_array(path)
        except ValueError as error:
            raise ValueError(f"{error}; {fix}") from None
    if mask.dtype != np.bool_ or mask.shape != (num_ids,):
        raise ValueError(
            f"{path}: {one_line(mask.dtype)} of shape {list(mask.shape)}, not bool of shape"
            f" [{num_ids}]; {fix}"
        )
    return mask


def _ids_of(path: Path) -> Path | None:
    """Return the path of the ids of the mask ``path``; None if ``path`` is not a mask."""
    if not path.name.endswith(_MASK_SUFFIX):
        return None
    return path.with_name(path.name.removesuffix(_MASK_SUFFIX) + _SUFFIX)


def _exists(path: Path) -> bool:
    with reading(path):
        return path.is_file()
