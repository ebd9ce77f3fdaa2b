"""Rows of a unit's saved tensors by what the plan does with them: cutting, and joining again.

A tensor's first rows are moved, the next are kept, the last are rebuilt. Where ranks share weights
out (Megatron), those of the residual stream have a rank's own tokens, the others all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from sppo.activations.placement import CLASSES
from sppo.activations.policy import RESIDUAL, tensors_of
from sppo.config.model import ModelConfig
from sppo.model.layer import Saved, token_dimension
from sppo.planning.plan import SubsequencePlan


class TensorRows(NamedTuple):
    """How many rows of one tensor are moved, and how many kept."""

    offloaded: int
    retained: int


def tensor_rows(
    plan: SubsequencePlan,
    model: ModelConfig,
    *,
    own_input: bool,
    residual: SubsequencePlan | None = None,
) -> dict[str, TensorRows]:
    """By name, without the tensors of which nothing is saved.

    Args:
        plan: of the tokens that tensors have.
        model: the shape.
        own_input: whether x_in is among them.
        residual: of the tokens that those of the residual stream have; None: the same.
    """
    rows = {}
    for index in range(len(CLASSES)):
        for name in sorted(tensors_of((index,), model)):
            of_tensor = residual if residual is not None and name in RESIDUAL else plan
            of_class = TensorRows(of_tensor.offloaded[index], of_tensor.retained[index])
            if sum(of_class) and (own_input or name != "x_in"):
                rows[name] = of_class
    return rows


def check_whole_classes(plans: Iterable[SubsequencePlan]) -> None:
    """Refuse what ranks that share weights out cannot do: rebuild the last rows of a tensor.

    Raises:
        ValueError: a class is rebuilt in part.
    """
    for number, plan in enumerate(plans):
        for index, name in enumerate(CLASSES):
            saved = plan.retained[index] + plan.offloaded[index]
            if saved and plan.recomputed[index]:
                raise ValueError(
                    f"the plan recomputes {plan.recomputed[index]} of "
                    f"{saved + plan.recomputed[index]} rows of {name} of subsequence {number}, "
                    "and with parallel.sequence_parallel=megatron tensors are recomputed whole or "
                    "not at all: solve again, or write parallel.sequence_parallel=ulysses"
                )


def share(plan: SubsequencePlan, parts: Sequence[int]) -> tuple[SubsequencePlan, ...]:
    """What each rank does with its tokens of a subsequence, ``parts``, which add up to all of it.

    Everyone saves the same share, rounded down, so that what is rebuilt anywhere is rebuilt
    everywhere. Offsets of the moved rows are left at 0.
    """
    tokens = sum(parts)
    of_saved = [
        offloaded + retained
        for offloaded, retained in zip(plan.offloaded, plan.retained, strict=True)
    ]
    plans = []
    for part in parts:
        offloaded, saved = (
            [rows * part // tokens for rows in of_classes]
            for of_classes in (plan.offloaded, of_saved)
        )
        plans.append(
            SubsequencePlan(
                retained=_three(s - m for s, m in zip(saved, offloaded, strict=True)),
                offloaded=_three(offloaded),
                recomputed=_three(part - s for s in saved),
            )
        )
    return tuple(plans)


def _three(rows: Iterable[int]) -> tuple[int, int, int]:
    x_in, attention, linear = rows
    return x_in, attention, linear


def cut(saved: Saved, rows: Mapping[str, TensorRows]) -> tuple[Saved, Saved]:
    """(moved, kept) rows of ``saved``, which is emptied; views of its tensors."""
    offloaded: Saved = {}
    retained: Saved = {}
    for name, of_tensor in rows.items():
        tensor, dim = saved.pop(name), token_dimension(name)
        if of_tensor.offloaded:
            offloaded[name] = tensor.narrow(dim, 0, of_tensor.offloaded)
        if of_tensor.retained:
            retained[name] = tensor.narrow(dim, of_tensor.offloaded, of_tensor.retained)
    return offloaded, retained


def join(offloaded: Saved, retained: Saved) -> Saved:
    """What :func:`cut` cut, as far as it was saved."""
    joined = {**offloaded, **retained}
    for name in offloaded.keys() & retained.keys():
        joined[name] = torch.cat([offloaded[name], retained[name]], dim=token_dimension(name))
    return joined
